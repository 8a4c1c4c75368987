"""Loads `--config=NAME` with its typed overrides, `--config.train.steps=500`."""

import dataclasses
import functools
import importlib
import os
import types
from pathlib import Path
from typing import Any

from tftpu.config import Experiment, Function, KerasObject, declared_types
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import config_values, configs, keras_objects
from tftpu.launch.own_code import failures_of, import_config, own_code
from tftpu.launch.startup import quieten_tensorflow

# Fields of an experiment that the command line sets by the names of Keras.
_NAMED = ("optimizer", "loss", "metrics", "weighted_metrics")
_LENGTHS = {"steps": "epochs", "epochs": "steps"}  # of `train`; one of them is None
CONFIGS = Path(__file__).parent / "configs"


def names() -> list[str]:
    """Returns the names of the configs that come with tftpu, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")


def summary(name: str) -> str:
    """Returns the first line of a config's docstring."""
    text = (CONFIGS / f"{name}.py").read_text()
    return text.split('"""', 2)[1].strip().splitlines()[0]


def load(name: str, overrides: list[str]) -> Experiment:
    """Loads a config and applies overrides, checking the type of each.

    Args:
        name: name of a config of tftpu, or path of a user's own file.
        overrides: changes, as "--config.train.steps=500".

    Raises:
        UserError: there is no such config or field, or a value is of the wrong type.

    A file is imported as `launch.own_code` describes.
    """
    code = own_code(name)
    folder = code.folder if code else CONFIGS
    quieten_tensorflow()  # which the file may import
    with failures_of(f"The config {name!r}", folder):
        module = import_config(code) if code else _come_with_tftpu(name)
    if not hasattr(module, "get_config"):
        raise UserError(f"The config {name!r} has no function get_config().")
    with failures_of(f"The config {name!r}", folder):
        experiment = module.get_config()
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"get_config() of {name!r} returns a {type(experiment).__name__}: it must return a "
            "tftpu.Experiment."
        )
    experiment = keras_objects.described(experiment)
    experiment.config_file = str(code.file) if code else ""
    for override in overrides:
        _apply(experiment, override)
    return experiment


def _come_with_tftpu(name: str) -> types.ModuleType:
    if name not in names():
        if os.path.isfile(f"{name}.py"):
            raise UserError(
                f"There is no config {name!r}, but a file of that name: write {name}.py, as in "
                f"--config={name}.py."
            )
        raise UserError(f"There is no config {name!r}.{did_you_mean(name, names())}")
    return importlib.import_module(f"{configs.__name__}.{name}")


def _apply(experiment: Experiment, override: str) -> None:
    """Sets one field of an experiment."""
    argument, _, value = override.lstrip("-").partition("=")
    path = argument.split(".")[1:]
    _check_field(experiment, path, argument)
    if not value:
        raise UserError(f"--{argument} has no value: write --{argument}=VALUE.")
    parent: Any = functools.reduce(getattr, path[:-1], experiment)
    setattr(parent, path[-1], _parsed(parent, path[-1], argument, value))
    if parent is experiment.train and path[-1] in _LENGTHS and value.lower() != "none":
        # The last one named gives the length of the run: that of the config gives way.
        setattr(parent, _LENGTHS[path[-1]], None)


def _parsed(parent: Any, field: str, argument: str, value: str) -> Any:
    """Returns the value of a field as its type.

    Raises:
        UserError: it has another type.
    """
    kind: Any = declared_types(type(parent))[field]
    if field in _NAMED and isinstance(parent, Experiment):
        kind = tuple[str, ...] if field.endswith("metrics") else str
        if value.lower() == "none" and field != "optimizer":
            return () if field.endswith("metrics") else None
    try:
        return config_values.parse(value, kind)
    except ValueError as error:
        expected = config_values.in_words(kind)
        raise UserError(f"--{argument}={value}: the value must be {expected}.") from error
    except TypeError as error:
        shown = kind.__name__ if isinstance(kind, type) else kind
        raise UserError(
            f"--{argument} cannot be set on the command line, because its type is {shown}: set it "
            "in the config file."
        ) from error


def _check_field(experiment: Experiment, path: list[str], argument: str) -> None:
    here: Any = experiment
    for depth, field in enumerate(path):
        if not dataclasses.is_dataclass(here) or isinstance(here, KerasObject | Function):
            name = ".".join(["config", *path[:depth]])
            shown = repr(here) if isinstance(here, str) else getattr(here, "name", here)
            raise UserError(f"--{argument}: {name} is {shown}, which has no fields.")
        known = [f.name for f in dataclasses.fields(here)]
        if field not in known:
            parent = ".".join(["config", *path[:depth]])
            raise UserError(
                f"--{argument}: {parent} has no field {field!r}.{did_you_mean(field, known)}"
            )
        here = getattr(here, field)
    if len(path) == 1 and path[0] in _NAMED:
        return
    if path[-1] in ("callbacks", "config_file") and len(path) == 1:
        raise UserError(f"--{argument} cannot be set on the command line.")
    if dataclasses.is_dataclass(here):
        fields = ", ".join(f.name for f in dataclasses.fields(here))
        raise UserError(f"--{argument} names a group: set one of its fields ({fields}).")
