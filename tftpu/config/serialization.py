"""Experiments as JSON: the `config.json` of a workdir."""

import dataclasses
import importlib
import json
import typing
from typing import Any

from tftpu.config.experiment import Experiment
from tftpu.errors import UserError


def to_json(experiment: Experiment) -> str:
    """Returns the experiment as JSON, from which `from_json` makes an equal one.

    Raises:
        UserError: a field holds something that JSON cannot.
    """
    return json.dumps(to_plain(experiment), indent=2) + "\n"


def to_plain(value: Any, path: str = "config") -> Any:
    """Returns a value of an experiment as plain data: a dataclass becomes a dict with its class.

    Args:
        value: an experiment, or a part of one.
        path: of the value, for the error.

    Raises:
        UserError: a field holds something that JSON cannot.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        plain = {name: to_plain(getattr(value, name), f"{path}.{name}") for name in fields}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **plain}
    if isinstance(value, dict):
        return {str(key): to_plain(part, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part, f"{path}[{index}]") for index, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{path} is a {type(value).__name__}, which cannot be written to config.json: use numbers, "
        "texts, tuples, dicts or dataclasses of them, and make other objects in build() or "
        "training()."
    )


def from_json(text: str | bytes) -> Experiment:
    """Returns the experiment that `to_json` wrote.

    Raises:
        UserError: the text is not JSON or not an experiment, or one of its classes is missing.
    """
    try:
        experiment = _from_plain(json.loads(text), None)
    except (ValueError, TypeError, KeyError, ImportError, AttributeError, NameError) as error:
        raise UserError(f"config.json cannot be read as an experiment: {error}.") from error
    if not isinstance(experiment, Experiment):
        raise UserError("config.json holds no experiment.")
    return experiment


def _from_plain(value: Any, kind: Any) -> Any:
    """Returns the value that `to_plain` made plain.

    Args:
        value: plain data.
        kind: declared type of the field that it is in; without one a list becomes a tuple.
    """
    if isinstance(value, dict) and "class" in value:
        module, _, name = value["class"].rpartition(".")
        cls: Any = getattr(importlib.import_module(module), name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise TypeError(f"{value['class']} is not a dataclass")
        kinds = typing.get_type_hints(cls)
        parts = {k: _from_plain(v, kinds.get(k)) for k, v in value.items() if k != "class"}
        return cls(**parts)
    if isinstance(value, dict):
        # The description of a Keras object is plain data itself, with lists.
        raw = typing.get_origin(kind) is dict
        return value if raw else {key: _from_plain(part, None) for key, part in value.items()}
    if isinstance(value, list):
        parts = [_from_plain(part, None) for part in value]
        return parts if typing.get_origin(kind) is list else tuple(parts)
    return value
