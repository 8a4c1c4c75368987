"""Builds a copy of a compiled Keras model, to check it for other devices.

Raises an error if the copy may differ from the model: the check would price another step.
"""

import copy
import inspect
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tftpu.engines import keras_internals
from tftpu.errors import UserError
from tftpu.optim.policy import building_under
from tftpu.preflight.compiled_model import find_policy, refuse_uncompiled
from tftpu.preflight.likeness import find_difference, is_of_keras

_KEYWORDS = "**"  # stands for `**kwargs` in a list of parameters
_COMPILED = {_KEYWORDS, *inspect.signature(keras.Model.compile).parameters}


def build_function(model: keras.Model) -> Callable[[], keras.Model]:
    """Returns a function that builds and compiles a copy of a model.

    It uses the model's config, or its class if the config lacks the constructor's arguments.

    Args:
        model: the compiled model.

    Raises:
        UserError: the model is not compiled, or cannot be built again.
    """
    refuse_uncompiled(model)
    try:
        with building_under(find_policy(model)):
            build = _find_builder(model)
            _refuse_differences(build(), model)
    except Exception as error:
        said = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"The model {model.name!r} of the class {type(model).__name__} cannot be built again "
            f"from its config: {said[:300] or type(error).__name__}. Give a function that builds, "
            "compiles and returns it, and a batch, (x[:1024], y[:1024]) or tf.TensorSpecs: "
            "check(build, batch, slices)."
        ) from None
    return build


def _find_builder(model: keras.Model) -> Callable[[], keras.Model]:
    by_class = _loses_arguments(model)
    arguments = _find_arguments(model) if by_class else {}
    _refuse_lost_arguments(model, [] if by_class else keras_internals.list_layers(model))
    config: Any = None if by_class else keras.saving.serialize_keras_object(model)
    compiled = model.get_compile_config() if config is None else config.get("compile_config")
    objects = _list_own_objects(model)

    def build() -> keras.Model:
        with keras.saving.custom_object_scope(objects):
            built = type(model)(**arguments) if by_class else _deserialize(config)
            if _has_own_compile(type(model)):  # such as KerasHub's tasks
                keras.Model.compile(built, **_deserialize(compiled))
            elif by_class:
                built.compile_from_config(copy.deepcopy(compiled))
        return built

    return build


def _deserialize(config: Any) -> Any:
    # A copy, because Keras removes the layers of a functional model from the config that it reads.
    return keras.saving.deserialize_keras_object(copy.deepcopy(config), safe_mode=False)


def _refuse_lost_arguments(model: keras.Model, described: Sequence[keras.Layer]) -> None:
    """Raises `UserError` if the configs of layers in a model, or of `compile`, lack arguments."""
    for layer in filter(_loses_arguments, described):
        if names := _name_parameters(layer):
            raise UserError(_describe_loss(layer, names))
    kind = type(model)
    more = [one for one in _list_parameters(kind.compile) if one not in _COMPILED]
    if more and _has_own_compile(kind) and kind.train_step is not keras.Model.train_step:
        raise UserError(f"Keras loses arguments of {kind.__name__}.compile(): {', '.join(more)}")


def _loses_arguments(layer: keras.Layer) -> bool:
    """Returns whether the config of a layer lacks the arguments of its constructor.

    For subclasses of `keras.Model`, Keras 3.15.1's `get_config` returns the arguments' defaults.
    """
    kind = type(layer)
    if not isinstance(layer, keras.Model) or not is_of_keras(kind.get_config):
        return False
    return not is_of_keras(kind.__init__) and not keras_internals.keeps_graph(layer)


def _list_parameters(method: Callable[..., Any]) -> list[str]:
    """Returns the parameters of a method except `self`; `_KEYWORDS` stands for `**kwargs`."""
    _, *given = inspect.signature(method).parameters.values()
    return [_KEYWORDS if one.kind is one.VAR_KEYWORD else one.name for one in given]


def _name_parameters(layer: keras.Layer) -> list[str]:
    return [name for name in _list_parameters(type(layer).__init__) if name != _KEYWORDS]


def _describe_loss(layer: keras.Layer, names: Sequence[str]) -> str:
    return (
        f"Keras loses arguments of {type(layer).__name__}(): {', '.join(names)}, "
        "unless get_config() returns them"
    )


def _find_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns a model's constructor arguments, which it must keep as attributes of these names.

    Raises:
        UserError: the model lacks such an attribute, or these arguments build another model.
    """
    kept = {name: vars(model).get(name, ...) for name in _name_parameters(model)}
    if lost := [name for name, value in kept.items() if not _is_plain(value)]:
        missing = [name for name in lost if kept[name] is ...]
        hint = f", or the class keeps them, as in self.{missing[0]}" if missing == lost else ""
        raise UserError(_describe_loss(model, lost) + hint)
    copy = type(model)(**kept)
    if place := find_difference(copy, model):
        given = ", ".join(f"{name}={value!r}" for name, value in kept.items())
        raise UserError(f"{type(model).__name__}({given}) makes another model: {place} differs")
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    functions = types.FunctionType, types.BuiltinFunctionType
    return isinstance(value, (bool, int, float, str, type(None), *functions))


def _has_own_compile(kind: type) -> bool:
    """Returns whether Keras's `compile_from_config` skips a class, due to its own `compile`."""
    own = kind.compile is not keras.Model.compile
    return own and kind.compile_from_config is keras.Model.compile_from_config


def _list_own_objects(model: keras.Model) -> dict[str, Any]:
    """Returns the classes and functions of a model that are not Keras's, by their names.

    Those that share a name are left out, because a config cannot distinguish them.
    """
    layers = [model, *keras_internals.list_layers(model)]
    losses = [loss for loss in keras.tree.flatten(model.loss) if not isinstance(loss, str)]
    found = [*layers, *losses, model.optimizer]
    kinds = {one if inspect.isfunction(one) else type(one) for one in found}
    own = [kind for kind in kinds if not is_of_keras(kind)]
    counts = Counter(kind.__name__ for kind in own)
    return {kind.__name__: kind for kind in own if counts[kind.__name__] == 1}


def _refuse_differences(built: keras.Model, model: keras.Model) -> None:
    """Raises `UserError` if a copy has other weights or, if either is unbuilt, other layers."""
    both = built, model
    if built.built and model.built:
        weights = [[(tuple(v.shape), v.trainable) for v in one.weights] for one in both]
        if weights[0] != weights[1]:
            raise UserError("a copy has other weights, or trains others")
        return
    layers = [keras_internals.list_layers(one) for one in both]
    known = [[(type(o), o.trainable, o.dtype_policy.name) for o in some] for some in layers]
    # The first call may add layers; `_find_arguments` has compared the layers of subclasses.
    if len(known[0]) == len(known[1]) and known[0] != known[1]:
        raise UserError("a copy has other layers, dtypes or frozen layers")
    if any(layer.trainable and keras_internals.has_frozen(layer) for layer in layers[1]):
        raise UserError("a copy trains what is frozen")
