"""Checks that a model and its data agree in size, before anything is compiled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tftpu.engines import keras_internals
from tftpu.errors import UserError
from tftpu.tensors import Nest


def refuse_other_features(model: keras.Model, spec: Nest) -> None:
    """Raises `UserError` if the features do not have the sizes of the model's inputs.

    Args:
        model: one that declares no inputs, or has its own `call`, takes anything.
        spec: of a batch, `(x, ...)` of objects with a shape.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs or not type(model).call.__module__.startswith("keras."):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if isinstance(x, dict):
        wanted = {tensor.name: tensor.shape for tensor in inputs}
        if not wanted.keys() <= x.keys():  # the model was made with other keys than its names
            return
        pairs = [(f" {name!r}", shape, x[name].shape) for name, shape in wanted.items()]
    else:
        given = keras.tree.flatten(x)
        if len(given) > len(inputs):
            raise UserError(
                f"The model {model.name!r} has {len(inputs)} input(s), and the data {len(given)} "
                "features: pass one array for each input, as a list or by name as a dict."
            )
        if len(given) < len(inputs):  # which may be optional: Keras itself knows
            return
        pairs = [("", tensor.shape, part.shape) for tensor, part in zip(inputs, given)]
    for name, wanted, given in pairs:
        if not _fits(tuple(wanted), tuple(given)):
            raise UserError(
                f"The model {model.name!r} takes features{name} of shape {_example(wanted)} an "
                f"example, and the data has {_example(given)}: change keras.Input, or reshape the "
                "data."
            )


def refuse_other_labels(model: keras.Model, labels: Nest) -> None:
    """Raises `UserError` if a label names a class that the model's output does not have.

    On an accelerator such a label is not an error: the loss becomes NaN.

    Args:
        model: compiled and built.
        labels: the labels of all examples, or None.
    """
    terms, outputs = keras_internals.loss_terms(model), getattr(model, "outputs", None)
    if len(terms) != 1 or not outputs or not isinstance(labels, np.ndarray):
        return
    loss, classes = terms[0].loss, outputs[0].shape[-1]
    sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) or (
        terms[0].loss.name == "sparse_categorical_crossentropy"
    )
    if not sparse or classes is None or getattr(loss, "ignore_class", None) is not None:
        return
    least, most = labels.min(), labels.max()
    if least < 0 or most >= classes:
        raise UserError(
            f"The labels go from {least} to {most}, and the model's output has {classes} classes, "
            f"so they must go from 0 to {classes - 1}."
        )


@contextlib.contextmanager
def explained(spec: Nest) -> Iterator[None]:
    """Explains an error of building a model by the data that it was built for.

    Args:
        spec: of a batch, of objects with a shape.

    Raises:
        UserError: the block raised a `ValueError`, as Keras does for shapes that do not fit.
    """
    try:
        yield
    except ValueError as error:
        given = spec if isinstance(spec, tuple) else (spec,)
        names = ("x", "y", "sample_weight") if len(given) <= 3 else range(1, len(given) + 1)
        data = ", ".join(f"{name} {_described(part)}" for name, part in zip(names, given))
        raise UserError(
            f"The model cannot be trained on these data ({data} a batch): {str(error).strip()}"
        ) from error


def _fits(wanted: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Returns whether data fit an input; as in Keras, a last axis of 1 may be missing or extra."""
    if len(wanted) == len(given) + 1 and wanted[-1] == 1:
        given = (*given, 1)
    elif len(given) == len(wanted) + 1 and given[-1] == 1:
        given = given[:-1]
    return len(wanted) == len(given) and all(
        w is None or g is None or w == g for w, g in zip(wanted[1:], given[1:])
    )


def _example(shape: Any) -> str:
    return str(tuple(shape)[1:])


def _described(part: Nest) -> Nest:
    return keras.tree.map_structure(lambda s: str((*s.shape,)), part)
