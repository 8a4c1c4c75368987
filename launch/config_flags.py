"""Loads `--config=NAME` with its typed overrides, `--config.train.steps=500`.

ml_collections parses the overrides by the types of the config's dataclasses.
"""

import dataclasses
import functools
import importlib
import types
import typing
from pathlib import Path
from typing import Any

from absl import flags

from tftpu.config import Experiment, Function, KerasObject
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import configs, keras_objects
from tftpu.launch.own_code import failures_of, import_config, own_code
from tftpu.launch.startup import quieten_tensorflow

_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    float | None: "a number, or none",
    int | None: "a whole number, or none",
    tuple[int, ...]: "whole numbers in brackets, as (2,2,2,2)",
    tuple[str, ...]: "a name, or names in brackets, as \"('a','b')\"",
}
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
    """Returns the value of a field as its type."""
    kind: Any = typing.get_type_hints(type(parent))[field]
    if field in _NAMED and isinstance(parent, Experiment):
        names = tuple(filter(None, value.split(",")))
        return names if field.endswith("metrics") else None if value.lower() == "none" else value
    # ml_collections parses neither "none" for a field that may be None, nor a field that takes a
    # number or a word, as norm_batch does ("32" or "global").
    if value.lower() == "none" and type(None) in typing.get_args(kind):
        return None
    if kind == int | str:
        return int(value) if value.isdecimal() else value
    from ml_collections import config_flags

    flag = [f"--config.{field}={value}"]
    parsed = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass(
            "config", parent, sys_argv=["tftpu", *flag], flag_values=parsed
        )
        parsed(["tftpu", *flag])
        result = getattr(parsed["config"].value, field)
        _check_elements(result, kind)
    except (flags.Error, ValueError, TypeError, KeyError) as error:
        expected = _IN_WORDS.get(kind, str(kind))
        raise UserError(f"--{argument}={value}: the value must be {expected}.") from error
    return result


def _check_elements(value: object, kind: Any) -> None:
    """Raises TypeError if a tuple has elements of another type than its field declares."""
    if isinstance(value, tuple) and not all(isinstance(v, typing.get_args(kind)[0]) for v in value):
        raise TypeError(f"{value} is not {kind}")


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
