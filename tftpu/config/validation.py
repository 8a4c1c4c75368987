"""Checks shared by the config dataclasses; each raises `UserError` with the field's name."""

import dataclasses
import math
import types
import typing
from collections.abc import Collection
from typing import Any

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
    """Raises `UserError` unless the value is one of the allowed ones."""
    if value not in allowed:
        raise UserError(f"{field} is {value!r}, which is not known.{did_you_mean(value, allowed)}")


def declared_types(cls: type) -> dict[str, Any]:
    """Returns the types of a class's fields by name, also of those declared as text.

    Raises:
        UserError: a declaration names something that its file does not import.
    """
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise UserError(
            f"The type of a field of {cls.__name__} is not defined when it is loaded ({error}): "
            "import it in that file, not under TYPE_CHECKING."
        ) from error


def check_types(group: str, value: Any) -> None:
    """Raises `UserError` if a field's value is not of its declared type, or not finite.

    Args:
        group: the name of the config in the message, such as "train".
        value: a dataclass instance; nested dataclasses are checked too.
    """
    declared = declared_types(type(value))
    for field in dataclasses.fields(value):
        name, found = f"{group}.{field.name}", getattr(value, field.name)
        if isinstance(found, float) and not math.isfinite(found):
            raise UserError(f"{name} is {found}: it must be a finite number.")
        if not _is_instance(found, declared[field.name]):
            kind = declared[field.name]
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise UserError(f"{name} is {found!r}: its type must be {expected}.")
        if dataclasses.is_dataclass(found):
            check_types(name, found)


def _is_instance(value: Any, kind: Any) -> bool:
    """Returns whether a value has a declared type. An int is also a float, a bool is neither."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_is_instance(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple and arguments[-1] is not Ellipsis:  # one type for each element
        same = isinstance(value, tuple) and len(value) == len(arguments)
        return same and all(map(_is_instance, value, arguments))
    if origin in (tuple, list):
        return isinstance(value, origin) and all(_is_instance(v, arguments[0]) for v in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    kind = origin or kind
    return not isinstance(kind, type) or isinstance(value, kind)
