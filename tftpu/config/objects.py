"""Keras objects and functions in a config, as plain data that JSON can hold.

A Keras optimizer or metric has variables, which belong to the devices of one run. A config keeps
its description instead, and each model that is built gets its own object.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tftpu.errors import UserError

# The modules that Keras writes into its descriptions of public objects and of its models.
_KERAS = {
    *("keras", "keras.activations", "keras.constraints", "keras.dtype_policies"),
    *("keras.initializers", "keras.layers", "keras.losses", "keras.metrics", "keras.optimizers"),
    *("keras.optimizers.schedules", "keras.quantizers", "keras.random", "keras.regularizers"),
    "keras.src.models.functional",
}
# Keras's class names for plain values in descriptions; without `__lambda__`, which is bytecode.
_VALUES = ("__bytes__", "__ellipsis__", "__keras_tensor__", "__numpy__", "__slice__", "__tensor__")
_PUBLIC_FUNCTION = re.compile(
    r"(?:keras(?:\.src)?\.(activations|losses|metrics|ops)|tftpu\.optim\.(?:losses|metrics))"
    r"\.(?:\w+\.)*(\w+)"
)


@dataclasses.dataclass(frozen=True)
class KerasObject:
    """A Keras object, as `keras.saving.serialize_keras_object` describes it.

    Attributes:
        description: the dict that Keras returned, of plain data.
    """

    description: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the class, with its module."""
        module, name = self.description.get("module"), self.description["class_name"]
        return f"{module}.{name}" if module else name


@dataclasses.dataclass(frozen=True)
class Function:
    """A reference to a function by its name.

    Attributes:
        name: the function's module and name, such as "losses.focal".
    """

    name: str

    @property
    def public(self) -> tuple[str | None, str] | None:
        """The module (None for tftpu) and name of a function of Keras or tftpu; None for others."""
        found = _PUBLIC_FUNCTION.fullmatch(self.name)
        return (found[1], found[2]) if found else None


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yields a description of an object, and the descriptions of all objects inside it."""
    if isinstance(value, dict):
        if "class_name" in value:
            yield value
        for part in value.values():
            yield from parts_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from parts_of(part)


def own_name(part: dict[str, Any]) -> str | None:
    """Returns the name of the user's class or function in a description; None for Keras or tftpu.

    Raises:
        UserError: to create the object, Keras would import a module or run code from the config.
    """
    module, name = part.get("module"), part["class_name"]
    if name in _VALUES:
        return None
    if name == "function" and module == "builtins":  # Keras looks it up among its own functions
        name, module = str(part.get("config")).rpartition(">")[2], None
    elif name == "function":  # Keras never writes such a description, but would read it
        raise _explain_not_made(part)
    package = module.partition(".")[0] if isinstance(module, str) else None
    if isinstance(name, str) and name.isidentifier() and not name.startswith("__"):
        if module is None or module in _KERAS or package == "tftpu":
            return None
        if package not in (None, "", "builtins", "keras"):
            return f"{module}.{name}"
    raise _explain_not_made(part)


def _explain_not_made(part: dict[str, Any]) -> UserError:
    return UserError(
        f"The config describes {part.get('module')}.{part['class_name']!s:.60}, which cannot be "
        "recreated. Use public objects of Keras, such as keras.losses.Huber, or your own, but "
        "no lambdas."
    )


def names_in(value: Any) -> list[str]:
    """Returns the names of the user's classes and functions in a value of a config.

    Raises:
        UserError: an object is neither the user's nor public in Keras or tftpu.
    """
    if isinstance(value, Function):
        return [] if value.public else [value.name]
    if isinstance(value, KerasObject):
        return [name for part in parts_of(value.description) if (name := own_name(part))]
    if not isinstance(value, dict | list | tuple):
        return []
    several = value.values() if isinstance(value, dict) else value
    return [name for part in several for name in names_in(part)]
