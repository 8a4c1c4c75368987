"""Checks shared by the config dataclasses; each raises `UserError` with the field's name."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal, Union

from tftpu.config.field_types import FieldType, read_fields
from tftpu.errors import UserError, did_you_mean


def at_least(field: str, value: float, low: float) -> None:
    """Raises `UserError` unless the value is finite and not below `low`."""
    if not (value >= low and math.isfinite(value)):
        raise UserError(f"{field} is {value}: it must be {low} or more.")


def above(field: str, value: float | None, low: float) -> None:
    """Raises `UserError` unless the value is above `low`, or None."""
    if value is not None and not value > low:
        raise UserError(f"{field} is {value}: it must be above {low:g}, or None.")


def fraction(field: str, value: float) -> None:
    """Raises `UserError` unless the value is between 0 and 1, inclusive."""
    if not 0 <= value <= 1:
        raise UserError(f"{field} is {value}: it must be between 0 and 1.")


def one_of(field: str, value: str, allowed: Collection[str]) -> None:
    """Raises `UserError` unless the value is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{field} is {value!r}, which is not known.{did_you_mean(value, allowed)}")


def check_types(group: str, value: Any) -> None:
    """Raises `UserError` if a field's value is not of its declared type, or not finite.

    Args:
        group: the name of the config in the message, such as "train".
        value: a dataclass instance; nested dataclasses are checked too.
    """
    declared = read_fields(type(value))
    for field in dataclasses.fields(value):
        name, found = f"{group}.{field.name}", getattr(value, field.name)
        if isinstance(found, float) and not math.isfinite(found):
            raise UserError(f"{name} is {found}: it must be a finite number.")
        if not _is_instance(found, declared[field.name]):
            kind = declared[field.name].declared
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise UserError(f"{name} is {found!r}: its type must be {expected}.")
        if dataclasses.is_dataclass(found):
            check_types(name, found)


def _is_instance(value: Any, kind: FieldType) -> bool:
    """Returns whether a value has a declared type. An int is also a float; a bool is neither."""
    if kind.declared is Any:
        return True
    if kind.container is Union:
        return any(_is_instance(value, option) for option in kind.options)
    if kind.container is Literal:
        return value in kind.values
    if kind.is_fixed:
        same = isinstance(value, tuple) and len(value) == len(kind.parts)
        return same and all(map(_is_instance, value, kind.parts))
    if kind.container in (tuple, list):
        every = isinstance(value, kind.container)
        return every and all(_is_instance(part, kind.parts[0]) for part in value)
    if kind.declared in (int, float):
        return isinstance(value, (int, kind.declared)) and not isinstance(value, bool)
    plain = kind.container or kind.declared
    return not isinstance(plain, type) or isinstance(value, plain)
