"""Loads `--config=NAME` with its typed overrides, `--config.train.steps=500`."""

import dataclasses
import functools
import importlib
import os
import types
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tftpu import models
from tftpu.config import (
    Experiment,
    Function,
    KerasObject,
    OptimizerConfig,
    find_unreadable,
    find_unreadable_classes,
    read_fields,
)
from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.launch import configs
from tftpu.launch.correction import FIELDS
from tftpu.launch.settings import config_values, keras_objects
from tftpu.launch.settings.own_code import (
    OwnCode,
    failures_of,
    find_code,
    find_near_file,
    import_config,
    list_modules,
)
from tftpu.storage import files, side_files

# Fields of an experiment that may be set by the name of a Keras object.
_NAMED = ("optimizer", "loss", "metrics", "weighted_metrics")
# Arguments that, with decay="constant", give `OptimizerConfig` a Keras optimizer's defaults.
_KERAS_DEFAULTS = {
    "adamw": ", weight_decay=0.004",
    "lars": ", learning_rate=1.0",
    "lion": ", beta_2=0.99",
    "muon": ", weight_decay=0.004",
    "sgd": ", learning_rate=0.01, momentum=0.0",
}
# Fields of `train`; if one is set, the other is None.
_LENGTHS = {"steps": "epochs", "epochs": "steps"}
CONFIGS = Path(__file__).parent.parent / "configs"


def list_names() -> list[str]:
    """Returns the names of the configs that come with tftpu, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")


def read_summary(name: str) -> str:
    """Returns the first line of a config's docstring."""
    text = (CONFIGS / f"{name}.py").read_text()
    return text.split('"""', 2)[1].strip().splitlines()[0]


def load(name: str, overrides: list[str]) -> Experiment:
    """Loads a config and applies overrides, checking the type of each.

    Args:
        name: name of a config of tftpu, or path of a user's own file.
        overrides: changes, such as "--config.train.steps=500".

    Raises:
        UserError: there is no such config or field, or a value has the wrong type.

    A file is imported as `launch.settings.own_code` describes.
    """
    code = find_code(name)
    folder = code.folder if code else CONFIGS
    missing = UserError(
        f"The config {name!r} has no get_config() that returns a tftpu.Experiment (`tftpu init "
        "NAME` writes one). If it is a script, run it with `python`; `tftpu.preflight.check` "
        "predicts the model's memory, time and price."
    )
    if code and not any(word in code.file.read_bytes() for word in (b"get_config", b"import *")):
        raise missing  # not imported: without get_config(), it may be a script that trains
    module = _import_module(name, code)
    if not hasattr(module, "get_config"):
        raise missing
    # Modules are listed before the call: a command on a workdir imports the file, but does not call
    # get_config().
    readable = list_modules(code) if code else None
    with failures_of(f"The config {name!r}", folder):
        experiment = module.get_config()
    experiment = describe_experiment(experiment, repr(name))
    if readable:
        _check_readable(experiment, name, *readable)
    experiment.config_file = str(code.file) if code else ""
    apply_overrides(experiment, overrides)
    return experiment


def apply_overrides(experiment: Experiment, changes: Sequence[str]) -> None:
    """Applies overrides in order; raises one `UserError` that lists all that cannot be applied."""
    check_lengths(changes)
    mistakes = []
    for change in changes:
        try:
            apply_override(experiment, change)
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))


def check_lengths(changes: Sequence[str]) -> None:
    """Raises `UserError` if overrides give the length of the run twice, in steps and in epochs."""
    lengths = {
        name: change
        for name in _LENGTHS
        for change in changes
        if change.startswith(f"--config.train.{name}=") and not change.lower().endswith("=none")
    }
    if len(lengths) > 1:
        raise UserError(
            f"{lengths['steps']} and {lengths['epochs']} both give the length of the run: leave "
            "one of them out."
        )


def _check_readable(
    experiment: Experiment,
    name: str,
    own: Collection[str],
    imported: Collection[str],
    written: Collection[str],
) -> None:
    """Raises `UserError` if the config.json of an experiment could not be read again.

    Args:
        experiment: the experiment with descriptions of its Keras objects.
        name: the name of the config.
        own, imported, written: as for `tftpu.config.from_json`, listed before `get_config` runs.
    """
    for path in find_unreadable(experiment, own, imported, written):
        package, _, attribute = path.rpartition(".")
        raise UserError(
            f"The config {name!r} uses {path}, which later commands on its workdir, such as "
            f"`tftpu evaluate`, could not load. Write `from {package} import {attribute}` at the "
            "top of the config file; this works for losses, metrics and optimizers derived from "
            "Keras's classes, and for functions under the names they were defined with. "
            "Otherwise, write your own subclass or function in a file beside the config."
        )
    for cls in find_unreadable_classes((experiment.model, experiment.data), own, imported):
        raise UserError(
            f"The config {name!r} uses {cls.__module__}.{cls.__qualname__}, which commands on its "
            "workdir, such as `tftpu evaluate`, could not find, because they do not call "
            f"get_config(): write `import {cls.__module__}` at the top of the file."
        )


def describe_experiment(found: Any, where: str) -> Experiment:
    """Returns the result of get_config(), with descriptions in place of Keras objects.

    Args:
        found: the result of get_config().
        where: the name of its file, for errors.

    Raises:
        UserError: the result is not an experiment, or an object in it cannot be described.
    """
    if not isinstance(found, Experiment):
        raise UserError(
            f"get_config() of {where} returns a {type(found).__name__}: it must return a "
            "tftpu.Experiment."
        )
    return keras_objects.describe_objects(found)


def load_space(name: str) -> tuple[str, ...]:
    """Returns the search space of a config's `get_space()`; () if it has no such function.

    Raises:
        UserError: there is no such config, or the function does not return a list of texts.
    """
    code = find_code(name)
    module = _import_module(name, code)
    if not hasattr(module, "get_space"):
        return ()
    with failures_of(f"The config {name!r}", code.folder if code else CONFIGS):
        found = module.get_space()
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise UserError(
            f"get_space() of {name!r} returns {found!r}: it must return a list of texts, such as "
            '["optimizer.learning_rate=log:1e-4..1e-1"].'
        )
    return tuple(found)


def find_config_of_run(folder: str) -> str | None:
    """Returns the name or path of the config that a run was trained with; None if unknown.

    If the config comes with tftpu, no path is recorded: its name is guessed from the folder's.
    """
    path = files.join(folder, "config.json")
    if not files.exists(path):
        return None
    found = side_files.read(path, config_file=str)
    file = found["config_file"] if found else ""
    if file:
        return os.path.relpath(file) if os.path.isfile(file) else None
    return find_nearest(Path(folder).name, list_names())


def _import_module(name: str, code: OwnCode | None) -> types.ModuleType:
    with failures_of(f"The config {name!r}", code.folder if code else CONFIGS):
        return import_config(code) if code else _import_bundled(name)


def _import_bundled(name: str) -> types.ModuleType:
    if name not in list_names():
        if os.path.isfile(f"{name}.py"):
            raise UserError(
                f"There is no config {name!r}, but there is a file of that name. Did you mean "
                f"'{name}.py'?"
            )
        if os.path.isfile(os.path.join(name, "goodput.json")):
            near = find_config_of_run(name)
            raise UserError(
                f"{name!r} is the folder of a run: name the config that it was trained with."
                f"{f' Did you mean {near!r}?' if near else ''}"
            )
        if name in models.names() and not find_nearest(name, list_names()):
            raise UserError(
                f"{name!r} is a model, and a config also names data: write a file with "
                f"model=tftpu.models.config({name!r}); `tftpu init NAME` writes one to change."
            )
        is_file = bool(Path(name).suffix)
        file = Path(name if is_file else f"{name}.py")
        near = find_near_file(file) if is_file or not find_nearest(name, list_names()) else None
        hint = f" Did you mean {near!r}?" if near else did_you_mean(name, list_names())
        raise UserError(f"There is no config {name!r}.{hint}")
    return importlib.import_module(f"{configs.__name__}.{name}")


def parse_override(experiment: Experiment, change: str) -> Any:
    """Returns the value that an override gives to its field, without setting it.

    Args:
        experiment: the experiment whose field it is.
        change: the override, such as "--config.train.steps=500".

    Raises:
        UserError: there is no such field, or the value has the wrong type.
    """
    argument, _, value = change.lstrip("-").partition("=")
    path = argument.split(".")[1:]
    _check_field(experiment, path, argument)
    if not value:
        raise UserError(f"--{argument} has no value: write --{argument}=VALUE.")
    parent: Any = functools.reduce(getattr, path[:-1], experiment)
    return _parse_value(parent, path[-1], argument, value)


def apply_override(experiment: Experiment, change: str) -> None:
    """Sets a field, as for `parse_override`; `train.steps` and `train.epochs` reset each other."""
    found = parse_override(experiment, change)
    argument, _, value = change.lstrip("-").partition("=")
    path = argument.split(".")[1:]
    parent: Any = functools.reduce(getattr, path[:-1], experiment)
    setattr(parent, path[-1], found)
    if parent is experiment.train and path[-1] in _LENGTHS and value.lower() != "none":
        # The flag replaces the length of the config, which may be in the other field.
        setattr(parent, _LENGTHS[path[-1]], None)


def _parse_value(parent: Any, field: str, argument: str, value: str) -> Any:
    """Returns the value of a field, converted to the field's type.

    Raises:
        UserError: the value has another type.
    """
    kind: Any = read_fields(type(parent))[field].declared
    if field in _NAMED and isinstance(parent, Experiment):
        kind = tuple[str, ...] if field.endswith("metrics") else str
        if value.lower() == "none" and field != "optimizer":
            return () if field.endswith("metrics") else None
    try:
        return config_values.parse(value, kind)
    except ValueError as error:
        expected = config_values.describe_kind(kind)
        plain = value.replace(",", "")
        hint = f" Did you mean {plain!r}?" if plain != value and plain.isdigit() else ""
        raise UserError(f"--{argument}={value}: the value must be {expected}.{hint}") from error
    except TypeError as error:
        shown = kind.__name__ if isinstance(kind, type) else kind
        raise UserError(
            f"--{argument} cannot be set on the command line, because its type is {shown}: set it "
            "in the config file."
        ) from error


def _suggest_field(
    experiment: Experiment, parents: Sequence[str], field: str, known: Sequence[str]
) -> str:
    """Returns a suggestion for an unknown field, from its own group or from another one."""
    parent, _, other = FIELDS.get(field, "").rpartition(".")
    if parent and parent == ".".join(parents):
        return f" Did you mean {other!r}?"
    groups = list_fields(experiment)
    meant = other or field
    if len(parents) < 2 and meant in groups:
        return f" Did you mean '{groups[meant]}'?"
    named = experiment.optimizer
    if len(parents) < 2 and isinstance(named, str) and meant in read_fields(OptimizerConfig):
        return f" Did you mean 'optimizer.{meant}'?{_describe_optimizer(named)}"
    others = _find_sources_with(field) if list(parents) == ["data"] else []
    if others:
        one = type(experiment.data).__name__
        return f" It is a field of {' and '.join(others)}, and the data of this config are {one}."
    return did_you_mean(field, known)


def _find_sources_with(field: str) -> list[str]:
    """Returns the names of tftpu's data classes that have a field."""
    from tftpu.input_pipelines import sources

    kinds: dict[str, Any] = {name: getattr(sources, name) for name in sources.__all__}
    found = {name: kind for name, kind in kinds.items() if hasattr(kind, "training")}
    return [n for n, kind in found.items() if field in {f.name for f in dataclasses.fields(kind)}]


def list_fields(experiment: Experiment) -> dict[str, str]:
    """Returns the paths of an experiment's fields, such as "train.steps", by field name."""
    return {
        field.name: f"{group.name}.{field.name}"
        for group in reversed(dataclasses.fields(experiment))
        if dataclasses.is_dataclass(part := getattr(experiment, group.name))
        for field in dataclasses.fields(part)
    }


def _describe_optimizer(name: str) -> str:
    """Returns advice to replace an optimizer's name by an equivalent `OptimizerConfig`."""
    settings = _KERAS_DEFAULTS.get(name.lower(), "")
    but = ", except that it leaves biases and norms without weight decay" * ("weight" in settings)
    return (
        f' Write optimizer=tftpu.OptimizerConfig("{name}", decay="constant"{settings}) in the '
        f"config's file, which trains as {name!r} does{but}."
    )


def _check_field(experiment: Experiment, path: list[str], argument: str) -> None:
    here: Any = experiment
    for depth, field in enumerate(path):
        if not dataclasses.is_dataclass(here) or isinstance(here, KerasObject | Function):
            name = ".".join(["config", *path[:depth]])
            shown = repr(here) if isinstance(here, str) else getattr(here, "name", here)
            advice = ""
            if path[0] == "optimizer" and isinstance(here, str):
                advice = _describe_optimizer(here)
            raise UserError(f"--{argument}: {name} is {shown}, which has no fields.{advice}")
        known = [f.name for f in dataclasses.fields(here)]
        if field not in known:
            parent = ".".join(["config", *path[:depth]])
            raise UserError(
                f"--{argument}: {parent} has no field {field!r}."
                f"{_suggest_field(experiment, path[:depth], field, known)}"
            )
        here = getattr(here, field)
    if len(path) == 1 and path[0] in _NAMED:
        return
    if path[-1] in ("callbacks", "config_file") and len(path) == 1:
        raise UserError(f"--{argument} cannot be set on the command line.")
    if dataclasses.is_dataclass(here):
        fields = ", ".join(f.name for f in dataclasses.fields(here))
        raise UserError(f"--{argument} names a group: set one of its fields ({fields}).")
