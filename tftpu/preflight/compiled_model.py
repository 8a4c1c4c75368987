"""Takes a compiled Keras model for a check: how to build it again, and the spec of its batch."""

import copy
import dataclasses
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tftpu.config import PRECISIONS
from tftpu.engines import keras_internals
from tftpu.errors import UserError
from tftpu.preflight.options import PreflightOptions
from tftpu.tensors import Nest

# Attributes of a model or layer that differ between equal ones, or say how often it was called.
_BY_KERAS = ("name", "input_names", "output_names", "built", "compiled", "loss", "stop_training")


def build_function(model: keras.Model) -> Callable[[], keras.Model]:
    """Returns a function that builds and compiles a model like another one.

    It is built from its config; a class that has none is called with its constructor's defaults.

    Args:
        model: the compiled model.

    Raises:
        UserError: the model is not compiled, or does not describe itself.
    """
    _refuse_uncompiled(model)
    try:
        build = _find_builder(model)
        _refuse_differences(build(), model)
    except Exception as error:
        said = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"The model {model.name!r} of the class {type(model).__name__} cannot be built again "
            f"from its config: {said[:300] or type(error).__name__}. Return what the constructor "
            "takes from get_config(), or give a function that builds, compiles and returns it, and "
            "a batch, (x[:1024], y[:1024]) or tf.TensorSpecs: check(build, batch, slices)."
        ) from None
    return build


def _find_builder(model: keras.Model) -> Callable[[], keras.Model]:
    given = _list_parameters(type(model)) if _loses_arguments(model) else []
    if needed := [one.name for one in given if one.default is one.empty]:
        raise UserError(
            f"Keras does not keep what {type(model).__name__}() was given as {', '.join(needed)}"
        )
    config: Any = keras.saving.serialize_keras_object(model)
    compiled: Any = config.pop("compile_config", None)
    objects = _list_own_objects(model)
    calls_class = _loses_arguments(model)

    def build() -> keras.Model:
        # Copies, since Keras takes the parts of a functional model out of the config that it reads.
        with keras.saving.custom_object_scope(objects):
            # A class with a `compile` of its own may be compiled by its constructor, as KerasHub's
            # tasks are, but not by `compile_from_config`.
            built = type(model)() if calls_class else _deserialize(config)
            keras.Model.compile(built, **_deserialize(compiled))
        return built

    return build


def _loses_arguments(model: keras.Model) -> bool:
    """Returns whether the config of a model lacks the arguments of its constructor.

    `keras.Model.get_config` gives the defaults of a subclass in their place (Keras 3.15.1).
    """
    kind = type(model)
    inherited = _is_of_keras(kind.__init__) or not _is_of_keras(kind.get_config)
    takes_graph = {"inputs", "outputs"} <= inspect.signature(kind.__init__).parameters.keys()
    return not inherited and not takes_graph


def _list_parameters(kind: type) -> list[inspect.Parameter]:
    """Returns the parameters of a constructor, apart from `self` and any keywords."""
    _, *given = inspect.signature(kind.__init__).parameters.values()
    return [one for one in given if one.kind is not one.VAR_KEYWORD]


def _list_own_objects(model: keras.Model) -> dict[str, Any]:
    """Returns the classes and functions of a model that are not Keras's, by their names."""
    layers = [model, *keras_internals.list_layers(model)]
    losses = [loss for loss in keras.tree.flatten(model.loss) if not isinstance(loss, str)]
    found = [*layers, *losses, model.optimizer]
    kinds = [one if inspect.isfunction(one) else type(one) for one in found]
    return {kind.__name__: kind for kind in kinds if not _is_of_keras(kind)}


def _is_of_keras(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in ("keras", "builtins")


def _refuse_differences(built: keras.Model, model: keras.Model) -> None:
    """Raises `UserError` if a model that was built again has other weights, layers or settings."""
    if built.get_compile_config() != model.get_compile_config():
        raise UserError("the copy is compiled with other arguments")
    copies, layers = ([one, *keras_internals.list_layers(one)] for one in (built, model))
    if [type(one) for one in copies] != [type(one) for one in layers]:
        raise UserError("the copy has other layers")
    for copied, layer in zip(copies, layers):
        again = _read_settings(copied)
        for name, was in _read_settings(layer).items():
            if was != (now := again.get(name)):
                kind = type(layer).__name__
                raise UserError(f"{name} of {kind} is {was!r:.80}, but {now!r:.80} in the copy")
    shapes = [[tuple(v.shape) for v in one.weights] for one in (built, model)]
    if built.built and model.built and shapes[0] != shapes[1]:
        raise UserError("the copy has weights of other shapes")


def _read_settings(layer: keras.Layer) -> dict[str, Any]:
    """Returns the config of a layer of Keras, or else the attributes that its own class sets.

    Names and dtypes are left out; the layers of a model are compared one by one.
    """
    if not _is_of_keras(type(layer)):
        kept = vars(layer).items()
        return {
            name: value if _is_plain(value) else type(value).__name__
            for name, value in kept
            if not name.startswith("_") and name not in _BY_KERAS
        }
    return {} if isinstance(layer, keras.Model) else _without_names(layer.get_config())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        left_out = ("name", "dtype", "registered_name", "build_config")
        return {k: _without_names(v) for k, v in config.items() if k not in left_out}
    return [_without_names(one) for one in config] if isinstance(config, list | tuple) else config


def choose_precision(model: keras.Model, options: PreflightOptions) -> PreflightOptions:
    """Returns options with the precision that the layers of a model already have."""
    if options.precision != "auto":
        return options
    found = read_precision(model)
    return dataclasses.replace(options, precision=found if found in PRECISIONS else "float32")


def read_precision(model: keras.Model) -> str:
    """Returns the dtype policy of a model's layers: the mixed one if there is, else all."""
    layers = keras_internals.list_layers(model)
    # Without weights, as those of a class that was not called yet, any layer tells.
    weighted = [layer for layer in layers if layer.weights] or layers
    found = sorted({layer.dtype_policy.name for layer in weighted})
    mixed = [name for name in found if name in ("mixed_bfloat16", "mixed_float16")]
    return mixed[0] if mixed else " and ".join(found) or "float32"


def read_batch_spec(batch: Nest, find_model: Callable[[], keras.Model]) -> Nest:
    """Returns the spec of a batch.

    Args:
        batch: `(x, y)` or `(x, y, sample_weight)` of arrays or `tf.TensorSpec`s; or the number of
            examples, for which the inputs and the loss of the model tell the rest.
        find_model: returns the compiled model; called only for a number of examples.

    Raises:
        UserError: the number of examples is not enough.
    """
    if not isinstance(batch, numbers.Integral):
        return keras.tree.map_structure(_to_spec, batch)
    arrays = f"a batch, (x[:{batch}], y[:{batch}]), or tf.TensorSpecs of its shapes"
    model = find_model()
    _refuse_uncompiled(model)
    if not getattr(model, "inputs", None) or len(model.outputs) != 1:
        raise UserError(
            "The number of examples tells the batch only of a model with symbolic inputs and one "
            f"output: give {arrays}."
        )
    shapes = [(int(batch), *tensor.shape[1:]) for tensor in model.inputs]
    if any(size is None for shape in shapes for size in shape):
        raise UserError(f"The inputs have the shapes {shapes}: give a batch of static shapes.")
    specs = [tf.TensorSpec(shape, t.dtype) for shape, t in zip(shapes, model.inputs)]
    x = keras_internals.pack_inputs(model, specs)
    y_shape = (int(batch), *model.outputs[0].shape[1:])
    if _is_sparse(model.loss):
        return x, tf.TensorSpec(y_shape[:-1], tf.int32)
    return x, tf.TensorSpec(y_shape, tf.float32)


def refuse_other_shapes(model: keras.Model, batch_spec: Nest) -> None:
    """Raises `UserError` for a batch that a model with one input and one output cannot take.

    Args:
        model: the compiled model.
        batch_spec: `(x, y)` or `(x, y, sample_weight)`.
    """
    x, y = batch_spec[:2]
    single = all(isinstance(spec, tf.TensorSpec) for spec in (x, y))
    if not single or not getattr(model, "inputs", None):
        return
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        return
    takes, gives = (list(t.shape[1:]) for t in (model.inputs[0], model.outputs[0]))
    given, labels = x.shape.as_list()[1:], y.shape.as_list()[1:]
    if len(given) == len(takes) and any(n not in (None, m) for n, m in zip(takes, given)):
        raise UserError(
            f"The examples of the batch have the shape {given}, but the model takes {takes}."
        )
    if not gives or gives[-1] is None or gives[-1] < 2:
        return
    if _is_sparse(model.loss) and labels == gives:
        raise UserError(
            f"The labels of the batch have the shape {labels}, one-hot, but the loss takes class "
            "numbers: give np.argmax(y, axis=-1), or compile the model with "
            "CategoricalCrossentropy."
        )
    if _is_categorical(model.loss) and labels == gives[:-1]:
        raise UserError(
            f"The labels of the batch have the shape {labels}, class numbers, but the loss takes "
            f"{gives}, one-hot: give keras.ops.one_hot(y, {gives[-1]}), or compile the model with "
            "SparseCategoricalCrossentropy."
        )


def _refuse_uncompiled(model: keras.Model) -> None:
    if not getattr(model, "compiled", False):
        raise UserError(
            f"The model {model.name!r} is not compiled: call model.compile(optimizer, loss) first."
        )


def _deserialize(config: Any) -> Any:
    return keras.saving.deserialize_keras_object(copy.deepcopy(config), safe_mode=False)


def _to_spec(value: Any) -> Any:
    if isinstance(value, tf.TypeSpec):
        return value
    return tf.TensorSpec(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))


def _is_sparse(loss: Any) -> bool:
    """Returns whether the labels of a compiled loss are class numbers."""
    return "sparse" in _read_name(loss)


def _is_categorical(loss: Any) -> bool:
    """Returns whether the labels of a compiled loss are shares of the classes."""
    name = _read_name(loss)
    return "categorical" in name and "sparse" not in name


def _read_name(loss: Any) -> str:
    return (loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__)).lower()
