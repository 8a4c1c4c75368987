"""Experiments as JSON: the `config.json` of a workdir."""

import dataclasses
import importlib
import json
from typing import Any

from tftpu.config.experiment import Experiment
from tftpu.errors import UserError


def to_json(experiment: Experiment) -> str:
    """Returns the experiment as JSON, from which `from_json` makes an equal one."""

    def encode(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
        return list(value) if isinstance(value, tuple) else value

    return json.dumps(encode(experiment), indent=2) + "\n"


def from_json(text: str | bytes) -> Experiment:
    """Returns the experiment that `to_json` wrote.

    Raises:
        UserError: the text is not JSON or not an experiment, or one of its classes is missing.
    """

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            module, _, name = value["class"].rpartition(".")
            cls: Any = getattr(importlib.import_module(module), name)
            if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
                raise TypeError(f"{value['class']} is not a dataclass")
            return cls(**{k: decode(v) for k, v in value.items() if k != "class"})
        return tuple(value) if isinstance(value, list) else value

    try:
        experiment = decode(json.loads(text))
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise UserError(f"config.json cannot be read as an experiment: {error}.") from error
    if not isinstance(experiment, Experiment):
        raise UserError("config.json holds no experiment.")
    return experiment
