"""Declared types are taken apart once, in one form for both ways to write them."""

import dataclasses
from typing import Any, Literal, Optional, Union

import pytest

from tftpu.config import read_fields, read_type
from tftpu.errors import UserError


@dataclasses.dataclass
class Inner:
    width: int = 1


@dataclasses.dataclass
class Outer:
    inner: "Inner | tuple[Inner, ...]"
    options: dict[str, Any]


@pytest.mark.parametrize("declared", [int | None, Optional[int], Union[int, None]])  # noqa: UP007, UP045
def test_a_union_is_the_same_in_each_notation(declared):
    assert [option.declared for option in read_type(declared).options] == [int, type(None)]


@pytest.mark.parametrize(
    ("declared", "container", "parts", "is_fixed"),
    [
        (int, None, [], False),
        (list[int], list, [int], False),
        (tuple[int, ...], tuple, [int], False),
        (tuple[int, str], tuple, [int, str], True),
        (dict[str, list[int]], dict, [str, list[int]], False),
        (Literal["a", 1], Literal, [], False),
    ],
)
def test_a_type_has_its_container_and_the_types_in_it(declared, container, parts, is_fixed):
    found = read_type(declared)
    assert (found.container, found.is_fixed) == (container, is_fixed)
    assert [part.declared for part in found.parts] == parts
    assert found.options == (found,) and read_type(found) is found
    assert found.values == (("a", 1) if container is Literal else ())


def test_dataclasses_are_found_wherever_a_declaration_names_them():
    fields = read_fields(Outer)
    assert [part.declared for part in fields["inner"].walk() if part.is_dataclass] == [Inner] * 2
    assert not any(part.is_dataclass for part in fields["options"].walk())


def test_a_type_that_is_not_imported_is_named():
    class Mine:
        field: "Missing"  # noqa: F821

    with pytest.raises(UserError, match=r"a field of Mine is not defined .*TYPE_CHECKING"):
        read_fields(Mine)
