"""Reads the precision and the batch spec of a compiled Keras model, for a check."""

import numbers
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tftpu.config import PRECISIONS
from tftpu.engines import keras_internals
from tftpu.errors import UserError
from tftpu.tensors import Nest


def find_policy(model: keras.Model) -> str:
    """Returns the dtype policy for building a copy of a model; float32 if unsupported."""
    found = read_precision(model)
    return found if found in PRECISIONS else "float32"


def read_precision(model: keras.Model) -> str:
    """Returns the layers' dtype policy: a mixed one if a layer has it, or all joined by "and"."""
    layers = keras_internals.list_layers(model)
    # If no layer has weights, as in a subclassed model before its first call, all layers count.
    weighted = [layer for layer in layers if layer.weights] or layers
    found = sorted({layer.dtype_policy.name for layer in weighted})
    mixed = [name for name in found if name in ("mixed_bfloat16", "mixed_float16")]
    return mixed[0] if mixed else " and ".join(found) or "float32"


def read_batch_spec(batch: Nest, find_model: Callable[[], keras.Model]) -> Nest:
    """Returns the spec of a batch: `tf.TensorSpec`s in place of its arrays.

    Args:
        batch: `(x, y)` or `(x, y, sample_weight)` of arrays or `tf.TensorSpec`s; or the number of
            examples: the model's inputs and loss then determine shapes and dtypes.
        find_model: returns the compiled model; called only if `batch` is a number.

    Raises:
        UserError: `batch` is a number, but the model is not compiled or does not determine shapes.
    """
    if not isinstance(batch, numbers.Integral):
        return keras.tree.map_structure(_to_spec, batch)
    arrays = f"a batch, (x[:{batch}], y[:{batch}]), or tf.TensorSpecs of its shapes"
    model = find_model()
    refuse_uncompiled(model)
    if not getattr(model, "inputs", None) or len(model.outputs) != 1:
        raise UserError(
            "A number of examples defines the batch only of a model with symbolic inputs and one "
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
    """Raises `UserError` if a batch's shapes do not fit the input or the loss of a model.

    Models with several inputs or outputs, or without symbolic inputs, are not checked.

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


def refuse_uncompiled(model: keras.Model) -> None:
    """Raises `UserError` for a model that is not compiled."""
    if not getattr(model, "compiled", False):
        raise UserError(
            f"The model {model.name!r} is not compiled: call model.compile(optimizer, loss) first."
        )


def _to_spec(value: Any) -> Any:
    if isinstance(value, tf.TypeSpec):
        return value
    return tf.TensorSpec(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))


def _is_sparse(loss: Any) -> bool:
    """Returns whether the labels of a compiled loss are class ids."""
    return "sparse" in _read_name(loss)


def _is_categorical(loss: Any) -> bool:
    """Returns whether the labels of a compiled loss are probabilities of the classes."""
    name = _read_name(loss)
    return "categorical" in name and "sparse" not in name


def _read_name(loss: Any) -> str:
    return (loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__)).lower()
