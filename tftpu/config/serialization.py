"""Experiments as JSON: the `config.json` of a workdir."""

import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tftpu.config.experiment import Experiment, Optimizer
from tftpu.config.objects import Function, KerasObject, names_in
from tftpu.errors import UserError

_COMPILED = ("optimizer", "loss", "metrics", "weighted_metrics")  # for `keras.Model.compile`


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


def from_json(text: str | bytes, folder: Path | None = None) -> Experiment:
    """Returns the experiment that `to_json` wrote.

    A file from elsewhere may name any module, and importing one runs it. So classes and functions
    are taken from tftpu, from `folder`, and from packages that the caller imported already; and a
    class only where its field declares it, or one that it derives from.

    Args:
        text: the content of `config.json`.
        folder: the folder of the run's own code, which must be on `sys.path`.

    Raises:
        UserError: the text is not JSON or not an experiment, or one of its classes is missing or
            is not allowed.
    """
    try:
        experiment = _from_plain(json.loads(text), Experiment, folder)
        if not isinstance(experiment, Experiment):
            raise UserError("config.json holds no experiment.")
        compiled = [getattr(experiment, name) for name in _COMPILED]
        for name in names_in(compiled):  # callbacks are only recorded
            _module(name, folder)
        return experiment
    except UserError:
        raise
    except (
        *(ValueError, TypeError, KeyError, AttributeError, NameError),
        *(ImportError, SyntaxError, RecursionError),
    ) as error:
        raise UserError(f"config.json cannot be read as an experiment: {error}.") from error


def _from_plain(value: Any, kind: Any, folder: Path | None) -> Any:
    """Returns the value that `to_plain` made plain.

    Args:
        value: plain data.
        kind: declared type of the field that it is in; without one a list becomes a tuple.
        folder: as for `from_json`.
    """
    if isinstance(value, dict) and "class" in value:
        cls = _class(value["class"], kind, folder)
        kinds = typing.get_type_hints(cls)
        parts = {k: _from_plain(v, kinds.get(k), folder) for k, v in value.items() if k != "class"}
        for name, part in parts.items():
            if _is_dataclass(kinds.get(name)) and not isinstance(part, kinds[name]):
                raise TypeError(f"{name} is {part!r}")
        return cls(**parts)
    inner = _inner(kind, value)
    if isinstance(value, dict):
        # The description of a Keras object is plain data itself, with lists.
        raw = typing.get_origin(kind) is dict and inner is Any
        return value if raw else {key: _from_plain(v, inner, folder) for key, v in value.items()}
    if isinstance(value, list):
        parts = [_from_plain(part, inner, folder) for part in value]
        is_list = any(list in (option, typing.get_origin(option)) for option in _options(kind))
        return parts if is_list else tuple(parts)
    return value


def _options(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, and another type as the only one."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _inner(kind: Any, value: Any) -> Any:
    """Returns the declared type of the elements of a list or dict; None if there is none."""
    for option in _options(kind):
        container, parts = typing.get_origin(option), typing.get_args(option)
        if container in (dict, Mapping) and isinstance(value, dict):
            return parts[1]
        if container in (list, tuple, Sequence) and isinstance(value, list):
            return parts[0]
    return None


def _class(path: str, kind: Any, folder: Path | None) -> type:
    """Returns a dataclass by its name.

    Raises:
        UserError: it is none that the field may hold.
    """
    cls: Any = getattr(_module(path, folder), path.rpartition(".")[2])
    allowed = (*_dataclasses_in(kind), Optimizer, KerasObject, Function)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and issubclass(cls, allowed)):
        raise UserError(
            f"config.json names the class {path}, which is not a "
            f"{' or '.join(c.__name__ for c in allowed)}: tftpu does not create it."
        )
    return cls


def _module(path: str, folder: Path | None) -> types.ModuleType:
    """Returns the module of a class or function.

    Raises:
        UserError: it is neither tftpu's, nor in the folder, nor imported.
    """
    name = path.rpartition(".")[0]
    package = name.partition(".")[0]
    if package == "tftpu" or (folder and _is_in(folder, name)):
        return importlib.import_module(name)
    if name in sys.modules and package not in sys.stdlib_module_names:
        return sys.modules[name]
    raise UserError(
        f"config.json names {path}, and {package!r} is not part of the run's own code: a module "
        "is imported only from tftpu or from the folder of the run's config file, or if that file "
        "imports it."
    )


def _is_in(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _dataclasses_in(kind: Any) -> tuple[type, ...]:
    """Returns the dataclasses among the types of a declaration, such as `A | tuple[B, ...]`."""
    inner = [cls for part in typing.get_args(kind) for cls in _dataclasses_in(part)]
    return (kind, *inner) if _is_dataclass(kind) else tuple(inner)


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)
