"""Checks that a model and its data fit each other, before anything is compiled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tftpu.engines import keras_internals
from tftpu.engines.objectives.own import has_own_compute_loss
from tftpu.errors import KerasError, UserError, counted, did_you_mean
from tftpu.tensors import Nest


def check_parts(model: keras.Model, spec: Nest, labels: bool = True) -> None:
    """Raises `UserError` if a batch has more than three parts, or lacks labels that are needed.

    Args:
        model: a model that is compiled with its loss.
        spec: the spec of a batch.
        labels: whether the loss and the metrics are computed, which need labels.
    """
    if isinstance(spec, tuple) and len(spec) > 3:
        raise UserError(
            f"A batch of the data has {len(spec)} parts: a compiled model takes (x, y) or (x, y, "
            "sample_weight). Several inputs are one part, as in ((a, b), y). A loss function can "
            "take any batch: Trainer(model, loss_fn=...)."
        )
    if not labels or has_own_compute_loss(model):
        return
    _check_named_labels(model, spec)
    given = keras_internals.describe_compiled_parts(model)
    if given and is_unlabelled(spec):
        raise UserError(
            f"The model was compiled with {' and '.join(given)}, which need labels, but the data "
            "has none: pass x and y, or batches of (x, y). For a model that predicts its own "
            "input, pass the input twice, (x, x)."
        )


def _check_named_labels(model: keras.Model, spec: Nest) -> None:
    """Raises `UserError` if a dictionary of labels lacks one for a loss of the model."""
    y = keras.utils.unpack_x_y_sample_weight(spec)[1]
    losses = getattr(model, "loss", None)
    if not isinstance(y, dict) or not isinstance(losses, dict):
        return
    needed = [name for name, loss in losses.items() if loss is not None]
    missing = [name for name in needed if name not in y]
    if missing:
        raise UserError(
            f"The labels are a dictionary with {', '.join(map(repr, y))}, but the model was "
            f"compiled with losses for {', '.join(map(repr, needed))}: give labels for "
            f"{missing[0]!r}, or compile the model without that loss."
        )


def is_unlabelled(spec: Nest) -> bool:
    """Returns whether a compiled model's batch contains only features."""
    return keras.utils.unpack_x_y_sample_weight(spec)[1] is None


def check_names(model: keras.Model) -> None:
    """Raises `UserError` if the model was compiled with a loss or metric name unknown to Keras."""
    known = {"loss": keras.losses, "metric": keras.metrics}
    special = ("accuracy", "acc", "crossentropy", "ce")  # names whose meaning depends on the labels
    for kind, names in keras_internals.list_compiled_names(model).items():
        for name in names:
            if name.lower() in special:
                continue
            try:
                known[kind].get(name)
            except ValueError as error:
                names_of_keras = [*special, *(n for n in vars(known[kind]) if n.islower())]
                near = did_you_mean(name, names_of_keras)
                raise UserError(
                    f"The model was compiled with the {kind} {name!r}, which Keras does not have."
                    f"{near}"
                ) from error


def check_features(model: keras.Model, spec: Nest) -> None:
    """Raises `UserError` if the number or the shapes of the features do not fit the model's inputs.

    Args:
        model: the model; not checked if it declares no inputs, or if a user defined its `call`.
        spec: the spec of a batch, `(x, ...)` of objects with a shape.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs or not type(model).call.__module__.startswith("keras."):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if isinstance(x, dict):
        wanted = {tensor.name: tensor.shape for tensor in inputs}
        # The keys may differ from the names of the inputs; then no shapes are compared.
        if not wanted.keys() <= x.keys():
            return
        pairs = [(f" {name!r}", shape, x[name]) for name, shape in wanted.items()]
    else:
        given = keras.tree.flatten(x)
        if len(given) > len(inputs):
            raise UserError(
                f"The model {model.name!r} has {counted(len(inputs), 'input')}, but the data has "
                f"{len(given)} features: pass one array for each input, in a list or in a dict by "
                "name."
            )
        if len(given) < len(inputs):  # some inputs may be optional, which Keras checks itself
            return
        pairs = [("", tensor.shape, part) for tensor, part in zip(inputs, given)]
    for name, wanted, part in pairs:
        given = tuple(wanted) if part is None else tuple(part.shape)  # an input may be optional
        if not _is_fitting(tuple(wanted), given):
            raise UserError(
                f"The model {model.name!r} takes features{name} of shape "
                f"{_format_example(wanted)} for each example, but the data has "
                f"{_format_example(given)}: change keras.Input, or reshape the data."
            )


@contextlib.contextmanager
def explained(spec: Nest, purpose: str = "train") -> Iterator[None]:
    """Adds the shapes of the data to errors that Keras raises in the `with` block.

    Args:
        spec: the spec of a batch, of objects with a shape.
        purpose: the verb for what is done with the model, such as "train".

    Raises:
        KerasError: the block raised a `ValueError`, as Keras does for shapes that do not fit.
    """
    try:
        yield
    except ValueError as error:
        given = spec if isinstance(spec, tuple) else (spec,)
        names = ("x", "y", "sample_weight") if len(given) <= 3 else range(1, len(given) + 1)
        data = ", ".join(f"{name} {_describe_part(part)}" for name, part in zip(names, given))
        raise KerasError(
            f"Keras cannot {purpose} the model with batches of {data}: {str(error).strip()}"
        ) from error


def _is_fitting(wanted: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Returns whether data fit an input; as in Keras, a last axis of 1 may be missing or extra."""
    if len(wanted) == len(given) + 1 and wanted[-1] == 1:
        given = (*given, 1)
    elif len(given) == len(wanted) + 1 and given[-1] == 1:
        given = given[:-1]
    return len(wanted) == len(given) and all(
        w is None or g is None or w == g for w, g in zip(wanted[1:], given[1:])
    )


def _format_example(shape: Any) -> str:
    return str(tuple(shape)[1:])


def _describe_part(part: Nest) -> Nest:
    return keras.tree.map_structure(lambda s: str(None if s is None else (*s.shape,)), part)
