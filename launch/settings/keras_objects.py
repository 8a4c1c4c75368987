"""Describes a config's Keras objects as plain data, and makes them when a model is built.

A Keras optimizer or metric creates variables when it is made. So each model that is built from a
config gets its own objects, which are made in the scope of its devices.
"""

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tftpu.config import Experiment, Function, KerasObject, OptimizerConfig
from tftpu.config.objects import names_in, own_name
from tftpu.errors import UserError
from tftpu.launch.settings import own_code


def describe_objects(experiment: Experiment) -> Experiment:
    """Returns the experiment with descriptions in place of Keras objects and functions.

    Raises:
        UserError: an object cannot be described, or a callback is not one.
    """
    changed = {
        name: _describe_value(getattr(experiment, name), name) for name in ("optimizer", "loss")
    }
    for name in ("metrics", "weighted_metrics"):
        changed[name] = _describe_value(_to_sequence(getattr(experiment, name)), name)
    callbacks = tuple(_to_sequence(experiment.callbacks))
    for callback in callbacks:
        if not hasattr(callback, "on_epoch_end"):
            raise UserError(
                f"callbacks holds a {type(callback).__name__}: give objects such as "
                "keras.callbacks.EarlyStopping(patience=3)."
            )
    return dataclasses.replace(experiment, callbacks=callbacks, **changed)


def _to_sequence(value: Any) -> Any:
    """Returns a list, tuple or dict unchanged, () for None, and a single object as a tuple."""
    if value is None:
        return ()
    return value if isinstance(value, list | tuple | dict) else (value,)


def describe_callbacks(experiment: Experiment) -> Experiment:
    """Returns the experiment for `config.json`, with the class and the settings of callbacks.

    Callbacks are never made from that description. A resumed run gets those of its config file.
    """
    return dataclasses.replace(
        experiment, callbacks=tuple(map(_describe_callback, experiment.callbacks))
    )


def build_optimizer(experiment: Experiment, build: Callable[..., Any]) -> Any:
    """Returns the Keras optimizer of an experiment.

    Args:
        experiment: the experiment with a length in steps.
        build: a function such as `tftpu.optim.optimizers.build`.
    """
    optimizer = experiment.optimizer
    if isinstance(optimizer, OptimizerConfig | str):
        steps = experiment.train.length
        return build(optimizer, experiment.data.global_batch_size, steps)
    return build_objects(optimizer, "optimizer")


def build_objects(value: Any, name: str) -> Any:
    """Returns the Keras objects that a value of a config describes; names and None stay.

    Args:
        value: names, descriptions, functions, or lists and dicts of them.
        name: the name of the field, for errors.

    Raises:
        UserError: a class or function cannot be imported, or an object cannot be made.
    """
    if isinstance(value, dict):
        return {key: build_objects(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [build_objects(part, name) for part in value]
    if isinstance(value, Function):
        area, attribute = value.public or (None, "")
        if area:
            return _import_object(f"keras.{area}.{attribute}", name)
        return _import_object(value.name, name)
    if isinstance(value, KerasObject):
        return _from_description(value, name)
    return (
        value
        if value is None or isinstance(value, str)
        else build_objects(_describe_value(value, name), name)
    )


def _describe_value(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str | OptimizerConfig | KerasObject | Function):
        return value
    if isinstance(value, dict):
        # In config.json, such a dictionary would look like a Keras object.
        if "class_name" in value:
            raise UserError(
                f"{name} is a dictionary that describes a {value['class_name']!s:.60}: give the "
                "object itself, such as keras.losses.Huber(), or call "
                "keras.saving.deserialize_keras_object."
            )
        return {key: _describe_value(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_describe_value(part, f"{name}[{index}]") for index, part in enumerate(value))
    if isinstance(value, types.FunctionType):
        function = Function(f"{value.__module__}.{value.__name__}")
        held = getattr(sys.modules.get(value.__module__), value.__name__, None)
        # `functools.wraps` gives a function the name of the one that it wraps.
        if not value.__qualname__.isidentifier() or not (function.public or held is value):
            raise UserError(
                f"{name} is the function {value.__qualname__!r}, which another process cannot "
                "find: define it with `def` at the top of a file beside the config."
            )
        return function
    if isinstance(value, type):
        raise UserError(f"{name} is the class {value.__name__}: write {value.__name__}().")
    if not hasattr(value, "get_config"):
        raise UserError(
            f"{name} is a {type(value).__name__}: give one of Keras's names, a Keras object, or a "
            "function."
        )
    import keras

    try:
        description: Any = keras.saving.serialize_keras_object(value)
    except Exception as error:
        raise UserError(
            f"{name}: {type(value).__name__}.get_config() fails with {_format_reason(error)}."
        ) from error
    described = KerasObject(description)
    _check_settings(value, _from_description(described, name), name)
    return described


def _check_settings(value: Any, again: Any, name: str) -> None:
    """Raises `UserError` if the copy of a user's object has other settings than the object."""
    if type(value).__module__.partition(".")[0] in ("keras", "tftpu"):
        return
    for setting, was in vars(value).items():
        now = getattr(again, setting, None)
        if isinstance(was, bool | int | float | str) and was != now:
            raise UserError(
                f"{name}: {setting} of {type(value).__name__} is {was!r}, but {now!r} in the copy "
                "that each model gets, made from get_config(). Add it to get_config(), as in "
                "`return {**super().get_config(), 'scale': self.scale}`."
            )


def _describe_callback(callback: Any) -> Any:
    if isinstance(callback, KerasObject):
        return callback
    cls = type(callback)
    settings = {
        key: getattr(callback, key)
        for key in inspect.signature(cls).parameters
        if isinstance(getattr(callback, key, None), bool | int | float | str)
    }
    return KerasObject({"module": cls.__module__, "class_name": cls.__name__, "config": settings})


def _import_object(path: str, name: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{name} needs {path}, which cannot be imported: {error}.") from error


def _from_description(value: KerasObject, name: str) -> Any:
    import keras

    own = {path.rpartition(".")[2]: _import_object(path, name) for path in names_in(value)}
    for text in _iterate_texts(value.description):
        _check_registered(text, name)
    try:
        return keras.saving.deserialize_keras_object(
            _set_registered_names(value.description), custom_objects=own, safe_mode=True
        )
    except Exception as error:
        raise UserError(
            f"{name}: each model gets a copy made from get_config(), but no {value.name} can be "
            f"made from it: {_format_reason(error)}. Its __init__ must take every key of "
            "get_config(), as with `def __init__(self, scale=1.0, **kwargs)` and "
            "`super().__init__(**kwargs)`."
        ) from error


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yields the texts of a description that Keras may read as the name of a registered object.

    Names of classes with a module are left out, because `own_name` checks them.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _iterate_texts(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            is_checked = key == "class_name" and value.get("module") is not None
            if not is_checked and key not in ("module", "name", "registered_name"):
                yield from _iterate_texts(part)


def _check_registered(text: str, name: str) -> None:
    """Checks the object that Keras would look up under a registered name and call.

    Keras finds everything that a loaded package has registered, such as a layer that reads files.

    Raises:
        UserError: the object does not belong to Keras or tftpu, and is not a function of the
            user's own code.
    """
    import keras

    found = keras.saving.get_registered_object(text)
    if found is None or found.__module__.partition(".")[0] in ("keras", "tftpu"):
        return
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    is_own = file is not None and not own_code.is_installed(Path(file))
    if not (is_own and isinstance(found, types.FunctionType)):
        raise UserError(
            f"{name}: {text!r} is registered by {found.__module__}, so commands on the workdir "
            "could not find it. Within a Keras object, use a function of Keras or tftpu, or one "
            "that a file beside the config registers."
        )


def _set_registered_names(value: Any) -> Any:
    """Returns a copy of a description with the registered names of its classes.

    Keras looks up a class by the name under which it was registered before it looks at the module.
    """
    if isinstance(value, list | tuple):
        return [_set_registered_names(part) for part in value]
    if not isinstance(value, dict):
        return value
    made = {key: _set_registered_names(part) for key, part in value.items()}
    if "class_name" in value:
        if own_name(value):
            made["registered_name"] = value["class_name"]
        else:
            ours = str(value.get("module")).startswith("tftpu.")
            made["registered_name"] = f"tftpu>{value['class_name']}" if ours else None
    return made


def _format_reason(error: Exception) -> str:
    """Returns an exception as one line; if Keras wraps it, the exception of the user's code."""
    first = error.__context__ or error
    return f"{type(first).__name__}: {' '.join(str(first).split()).rstrip('.')}"
