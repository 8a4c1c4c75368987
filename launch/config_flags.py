"""Loads `--config=NAME` with its typed overrides, `--config.train.steps=500`.

ml_collections parses the overrides by the types of the config's dataclasses.
"""

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import traceback
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from tftpu.config import Experiment
from tftpu.errors import UserError, did_you_mean

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
    """
    make = _import(name).get_config
    with _failures_of(name):
        experiment = make()
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"get_config() of {name!r} returns a {type(experiment).__name__}: it must return a "
            "tftpu.config.Experiment."
        )
    for override in overrides:
        experiment = _applied(experiment, override)
    return experiment


def _import(name: str) -> types.ModuleType:
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        if name.endswith(".py"):
            raise UserError(f"There is no config file {name!r}.")
        raise UserError(f"There is no config {name!r}.{did_you_mean(name, names())}")
    loader = importlib.machinery.SourceFileLoader(f"tftpu_config_{path.stem}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    if spec is None:
        raise UserError(f"The config file {name!r} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    with _failures_of(name):
        loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"The config {name!r} has no function get_config().")
    return module


@contextlib.contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Turns exceptions of a config file into `UserError`, with the line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
        line = f" in line {at[-1]}" if at else ""
        raise UserError(
            f"The config {name!r} fails{line} with {type(error).__name__}: {error}"
        ) from error


def _applied(experiment: Experiment, override: str) -> Experiment:
    argument, _, value = override.lstrip("-").partition("=")
    path = argument.split(".")[1:]
    _check_field(experiment, path, argument)
    if not value:
        raise UserError(f"--{argument} has no value: write --{argument}=VALUE.")
    parent = functools.reduce(getattr, path[:-1], experiment)
    kind: Any = typing.get_type_hints(type(parent))[path[-1]]
    # ml_collections parses neither "none" for a field that may be None, nor a field that takes a
    # number or a word, as norm_batch does ("32" or "global").
    if value.lower() == "none" and type(None) in typing.get_args(kind):
        setattr(parent, path[-1], None)
        return experiment
    if kind == int | str:
        setattr(parent, path[-1], int(value) if value.isdecimal() else value)
        return experiment
    from ml_collections import config_flags

    flag = [f"--{argument}={value}"]
    parsed = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass(
            "config", experiment, sys_argv=["tftpu", *flag], flag_values=parsed
        )
        parsed(["tftpu", *flag])
        result: Any = parsed["config"].value
        _check_elements(functools.reduce(getattr, path, result), kind)
    except (flags.Error, ValueError, TypeError) as error:
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
        known = [f.name for f in dataclasses.fields(here)] if dataclasses.is_dataclass(here) else []
        if field not in known:
            parent = ".".join(["config", *path[:depth]])
            raise UserError(
                f"--{argument}: {parent} has no field {field!r}.{did_you_mean(field, known)}"
            )
        here = getattr(here, field)
    if dataclasses.is_dataclass(here):
        fields = ", ".join(f.name for f in dataclasses.fields(here))
        raise UserError(f"--{argument} names a group: set one of its fields ({fields}).")
