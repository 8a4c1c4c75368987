"""Keras objects and functions in a config, as plain data that JSON can hold.

A Keras optimizer or metric has variables, which belong to the devices of one run. A config keeps
its description instead, and each model that is built gets an object of its own.
"""

import dataclasses
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
