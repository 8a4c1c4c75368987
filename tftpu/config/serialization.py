"""Experiments as JSON: the `config.json` of a workdir."""

import dataclasses
import importlib
import json
import numbers
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tftpu.config.experiment import Experiment, OptimizerConfig
from tftpu.config.field_types import UNDECLARED, FieldType, read_fields, read_type
from tftpu.config.objects import Function, KerasObject, names_in
from tftpu.config.renamed import update_class
from tftpu.errors import UserError

# Keys by declared type, which may be numbers of NumPy's; others are texts.
_KEYS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
_DICT = "dict"  # stands for a class in place of a dict with the key "class"
# Fields that are arguments of `keras.Model.compile`.
_COMPILED = ("optimizer", "loss", "metrics", "weighted_metrics")


def to_json(experiment: Experiment) -> str:
    """Returns the experiment as JSON, from which `from_json` makes an equal one.

    Raises:
        UserError: a field has a value that JSON cannot represent.
    """
    return json.dumps(to_plain(experiment), indent=2) + "\n"


def to_plain(
    value: Any, path: str = "config", described: bool = False, kind: FieldType = UNDECLARED
) -> Any:
    """Returns a value of an experiment as plain data: a dataclass becomes a dict with its class.

    Args:
        value: an experiment, or a part of one.
        path: the path of the value in the config, for the error message.
        described: whether it is a part of the description of a Keras object, whose dicts stay.
        kind: declared type of the value, which tells `from_json` whether keys are numbers.

    Raises:
        UserError: a field has a value that JSON cannot represent.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        described, kinds = isinstance(value, KerasObject), read_fields(type(value))
        plain = {
            f.name: to_plain(getattr(value, f.name), f"{path}.{f.name}", described, kinds[f.name])
            for f in dataclasses.fields(value)
        }
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **plain}
    if isinstance(value, dict):
        inner = _find_inner(kind, (dict, Mapping), 1)
        allowed = _KEYS.get(_find_inner(kind, (dict, Mapping), 0).declared, str)
        for key in value:
            if not described and (isinstance(key, bool) or not isinstance(key, allowed)):
                raise UserError(
                    f"{path} has the key {key!r}, which config.json would return as another key: "
                    "use texts, or numbers in a field whose type declares them, such as "
                    "dict[int, float]."
                )
        plain = {
            str(key): to_plain(part, f"{path}[{key!r}]", described, inner)
            for key, part in value.items()
        }
        # An output may be named "class", a key which otherwise names the class of a dataclass.
        return {"class": _DICT, "items": plain} if "class" in plain and not described else plain
    if isinstance(value, list | tuple):
        inner = _find_inner(kind, (list, tuple, Sequence), 0)
        return [
            to_plain(part, f"{path}[{index}]", described, inner) for index, part in enumerate(value)
        ]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{path} is a {type(value).__name__}, which cannot be written to config.json. Use "
        "numbers, texts, tuples, dicts, or dataclasses of these, and make other objects in "
        "build() or training()."
    )


def from_json(
    text: str | bytes,
    own: Collection[str] = (),
    imported: Collection[str] = (),
    written: Collection[str] = (),
) -> Experiment:
    """Returns the experiment that `to_json` wrote.

    A file from elsewhere may name any module, and importing a module runs its code. So only the
    modules in `own` are imported; classes of other modules must be loaded already. A class must be
    the one that its field declares, or derive from it, and Keras objects must be public.

    Args:
        text: the content of `config.json`.
        own: names of the modules of the run's own code, which must be on `sys.path`.
        imported: names of loaded modules of other packages, whose Keras objects are allowed.
        written: names that occur in the run's own code. A function of an imported module may be a
            loss or metric only if its name is among them: any other might, say, write a file.

    Raises:
        UserError: the text is not JSON or not an experiment, or one of its classes is missing or
            is not allowed.
    """
    try:
        experiment = _from_plain(json.loads(text), read_type(Experiment), own)
        if not isinstance(experiment, Experiment):
            raise UserError("config.json does not describe an experiment.")
        for name in _COMPILED:  # callbacks are not checked, because they are only recorded
            _check_compiled(getattr(experiment, name), name)
        for path in find_unreadable(experiment, own, imported, written):
            raise _explain_not_own(path)
        return experiment
    except UserError:
        raise
    except (
        *(ValueError, TypeError, KeyError, AttributeError, NameError),
        *(ImportError, SyntaxError, RecursionError),
    ) as error:
        raise UserError(f"config.json cannot be read as an experiment: {error}.") from error


def _from_plain(value: Any, kind: FieldType, own: Collection[str]) -> Any:
    """Restores a value from the plain data that `to_plain` returned.

    Args:
        value: plain data.
        kind: declared type of the value; a list becomes a tuple unless the type allows a list.
        own: as for `from_json`.
    """
    if isinstance(value, dict) and value.get("class") == _DICT:
        value = value["items"]
    elif isinstance(value, dict) and "class" in value:
        cls = _resolve_class(value["class"], kind, own)
        kinds = read_fields(cls)
        parts = {
            name: _from_plain(part, kinds.get(name, UNDECLARED), own)
            for name, part in value.items()
            if name != "class"
        }
        for name, part in parts.items():
            declared = kinds.get(name, UNDECLARED)
            if declared.is_dataclass and not isinstance(part, declared.declared):
                raise TypeError(f"{name} is {part!r}")
        return cls(**parts)
    if isinstance(value, dict):
        inner = _find_inner(kind, (dict, Mapping), 1)
        # The description of a Keras object is itself plain data, and its lists stay lists.
        raw = kind.container is dict and inner.declared is Any
        declared = _find_inner(kind, (dict, Mapping), 0).declared
        build_key = declared if declared in _KEYS else str  # in JSON, keys are texts
        return {
            build_key(key): v if raw else _from_plain(v, inner, own) for key, v in value.items()
        }
    if isinstance(value, list):
        inner = _find_inner(kind, (list, tuple, Sequence), 0)
        parts = [_from_plain(part, inner, own) for part in value]
        is_list = any(list in (option.declared, option.container) for option in kind.options)
        return parts if is_list else tuple(parts)
    return value


def _find_inner(kind: FieldType, containers: tuple[Any, ...], place: int) -> FieldType:
    """Returns the type at `place` in the brackets of a container's type; `UNDECLARED` if none."""
    found = (option.parts[place] for option in kind.options if option.container in containers)
    return next(found, UNDECLARED)


def _resolve_class(path: str, kind: FieldType, own: Collection[str]) -> type:
    """Returns a dataclass by its name.

    Raises:
        UserError: there is no such dataclass, or the field does not allow it.
    """
    found = _look_up(update_class(path), own)
    declared = tuple(part.declared for part in kind.walk() if part.is_dataclass)
    allowed = declared or (OptimizerConfig, KerasObject, Function)
    # Checks `type(found)`, because reading an attribute of an object that is loaded lazily would
    # load it.
    if not (issubclass(type(found), type) and dataclasses.is_dataclass(found)):
        raise _explain_not_own(path)
    cls: Any = found
    if not issubclass(cls, allowed):
        raise UserError(
            f"config.json names the class {path}, which is not a "
            f"{' or '.join(c.__name__ for c in allowed)}: tftpu does not create it."
        )
    return cls


def find_unreadable(
    experiment: Experiment,
    own: Collection[str],
    imported: Collection[str],
    written: Collection[str],
) -> Iterator[str]:
    """Yields the names of an experiment's classes and functions that `from_json` does not allow.

    Args:
        experiment: the experiment, with each Keras object described by a `KerasObject`.
        own, imported, written: as for `from_json`.
    """
    for field in _COMPILED:
        for part in _iterate_leaves(getattr(experiment, field)):
            for path in names_in(part):
                module, _, name = path.rpartition(".")
                found = _look_up(path, own)
                # Keras would call a function named inside a description with arguments from the
                # file, but calls a function that is itself the loss or the metric only with labels
                # and predictions.
                if isinstance(part, Function):
                    is_kind, is_allowed = type(found) is types.FunctionType, name in written
                else:
                    is_kind, is_allowed = _has_from_config(found), _is_keras(found)
                is_named = module in own or (module in imported and is_allowed)
                if not (is_kind and is_named and _is_of_package(found, module)):
                    yield path


def find_unreadable_classes(
    value: Any, own: Collection[str], imported: Collection[str]
) -> Iterator[type]:
    """Yields the config classes whose modules are not tftpu's and neither in `own` nor `imported`.

    Args:
        value: a part of an experiment, or several in a tuple.
        own, imported: as for `from_json`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        is_of_tftpu = cls.__module__.partition(".")[0] == "tftpu"
        if not is_of_tftpu and cls.__module__ not in {*own, *imported}:
            yield cls
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from find_unreadable_classes(part, own, imported)


def _check_compiled(value: Any, name: str) -> None:
    """Raises `UserError` for a value that `keras.Model.compile` must not receive.

    Args:
        value: the value of a field of the experiment.
        name: the name of the field.
    """
    kinds = (
        (str, OptimizerConfig, KerasObject) if name == "optimizer" else (str, Function, KerasObject)
    )
    for part in [value] if name == "optimizer" else _iterate_leaves(value):
        described = part.description if isinstance(part, KerasObject) else {"class_name": ""}
        if not (
            isinstance(part, kinds) and isinstance(described, dict) and "class_name" in described
        ):
            raise UserError(
                f"The {name} in config.json cannot be {part!r}: give the config that started the "
                "run."
            )


def _iterate_leaves(value: Any) -> Iterator[Any]:
    """Yields values in nested lists and dicts, except None; a dict with class_name is one value."""
    if isinstance(value, list | tuple) or (isinstance(value, dict) and "class_name" not in value):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iterate_leaves(part)
    elif value is not None:
        yield value


def _look_up(path: str, own: Collection[str]) -> Any:
    """Returns an attribute of a loaded module, or None; imports only modules in `own`.

    It reads the module's dictionary, because `getattr` might import other modules.
    """
    module, _, name = path.rpartition(".")
    if module in own:
        importlib.import_module(module)
    return vars(sys.modules[module]).get(name) if sys.modules.get(module) else None


def _is_of_package(found: Any, module: str) -> bool:
    """Returns whether a function or class belongs to the package of a module."""
    return found.__module__.partition(".")[0] == module.partition(".")[0]


def _has_from_config(found: Any) -> bool:
    """Returns whether an object is a class with `from_config`, the method that Keras calls."""
    kinds = found.__mro__ if issubclass(type(found), type) else ()
    return any("from_config" in vars(kind) for kind in kinds)


def _is_keras(found: Any) -> bool:
    """Returns whether an object is a Keras class, but not a layer: some layers run stored code."""
    kinds = found.__mro__ if issubclass(type(found), type) else ()
    modules = [kind.__module__ for kind in kinds]
    is_layer = any(module.startswith("keras.src.layers.") for module in modules)
    return not is_layer and any(module.partition(".")[0] == "keras" for module in modules)


def _explain_not_own(path: str) -> UserError:
    package = path.partition(".")[0]
    if package == "tftpu":
        return UserError(
            f"config.json names {path}, which is not a config of this version of tftpu."
        )
    return UserError(
        f"config.json names {path}, but {package!r} is not part of the run's own code. The file "
        "may name tftpu's configs, public objects of Keras, and what the run's config file "
        "(--config=FILE.py) defines or imports from its folder. From other packages that the "
        "config file imports, it may name losses, metrics, optimizers, and functions that occur "
        "in the config file's code."
    )
