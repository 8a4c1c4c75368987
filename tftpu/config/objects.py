"""Keras objects and functions in a config, as plain data that JSON can hold.

A Keras optimizer or metric has variables, which belong to the devices of one run. A config keeps
its description instead, and each model that is built gets an object of its own.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class KerasObject:
    """A Keras object, as `keras.saving.serialize_keras_object` describes it.

    Attributes:
        description: plain data.
    """

    description: dict[str, Any]

    @property
    def name(self) -> str:
        """The class, with its module."""
        module, name = self.description.get("module"), self.description["class_name"]
        return f"{module}.{name}" if module else name


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of a module.

    Attributes:
        name: with its module, such as "losses.focal".
    """

    name: str


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the descriptions of objects within a description, itself included."""
    if isinstance(value, dict):
        if isinstance(value.get("module"), str) and "class_name" in value:
            yield value
        for part in value.values():
            yield from parts_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from parts_of(part)


def is_own(part: dict[str, Any]) -> bool:
    """Returns whether a part describes an object of the user's, not one of Keras."""
    return part["module"].partition(".")[0] not in ("keras", "builtins", "tftpu")


def names_in(value: Any) -> list[str]:
    """Returns the user's classes and functions that a value of a config describes."""
    if isinstance(value, Function):
        return [value.name]
    if isinstance(value, KerasObject):
        own = filter(is_own, parts_of(value.description))
        return [f"{part['module']}.{part['class_name']}" for part in own]
    if not isinstance(value, dict | list | tuple):
        return []
    several = value.values() if isinstance(value, dict) else value
    return [name for part in several for name in names_in(part)]
