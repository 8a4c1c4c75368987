"""Parses the declared types of config fields, for checks, flags, overrides and JSON files."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tftpu.errors import UserError


class FieldType(NamedTuple):
    """The parsed type of a field.

    Attributes:
        declared: the declaration, such as `int | None`.
        container: `Union`, `Literal`, or the class of a declaration with brackets, such as `tuple`;
            None for all other types.
        parts: the types of a union, or those in the brackets.
        values: the values of a `Literal`.
        is_fixed: whether it is a tuple with one type for each element.
    """

    declared: Any
    container: Any = None
    parts: tuple["FieldType", ...] = ()
    values: tuple[Any, ...] = ()
    is_fixed: bool = False

    @property
    def options(self) -> tuple["FieldType", ...]:
        """The types of a union; for any other type, a tuple with only that type."""
        return self.parts if self.container is typing.Union else (self,)

    @property
    def is_dataclass(self) -> bool:
        """True if the values are objects of a dataclass."""
        return isinstance(self.declared, type) and dataclasses.is_dataclass(self.declared)

    def walk(self) -> Iterator["FieldType"]:
        """Yields the type, and all types within it."""
        yield self
        for part in self.parts:
            yield from part.walk()


UNDECLARED = FieldType(None)


def read_type(declared: Any) -> FieldType:
    """Parses a declared type, such as `dict[str, int] | None`; returns a `FieldType` unchanged."""
    if isinstance(declared, FieldType):
        return declared
    container, inside = typing.get_origin(declared), typing.get_args(declared)
    if container is typing.Literal:
        return FieldType(declared, container, values=inside)
    if container is types.UnionType:
        container = typing.Union
    parts = tuple(read_type(part) for part in inside if part is not Ellipsis)
    return FieldType(declared, container, parts, (), container is tuple and Ellipsis not in inside)


def read_fields(cls: type) -> dict[str, FieldType]:
    """Returns the types of a class's fields by name; resolves types that are declared as strings.

    Class variables (`ClassVar`) are left out.

    Raises:
        UserError: a declaration names something that its file neither defines nor imports.
    """
    try:
        found = typing.get_type_hints(cls)
    except NameError as error:
        raise UserError(
            f"The type of a field of {cls.__name__} is not defined when it is loaded ({error}): "
            "import it in that file, not under TYPE_CHECKING."
        ) from error
    fields = {name: kind for name, kind in found.items() if typing.get_origin(kind) is not ClassVar}
    return {name: read_type(kind) for name, kind in fields.items()}
