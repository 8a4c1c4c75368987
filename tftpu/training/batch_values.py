"""Finds values with which no model can be trained: NaN, and labels and ids outside their ranges."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from tftpu.engines import keras_internals
from tftpu.engines.objectives.compiled import find_ignored_class, takes_class_ids
from tftpu.engines.objectives.losses import align
from tftpu.engines.objectives.own import has_own_compute_loss
from tftpu.errors import UserError
from tftpu.tensors import Nest, ops

_KNOWN = ("keras.", "tftpu.")  # modules whose layers and models use their inputs unchanged
_SHOWN = 5  # maximum number of examples that a message lists


class Limit(NamedTuple):
    """The range of the class labels or ids in one array of a batch.

    Attributes:
        name: the name of the array in messages, such as "x[0]".
        values: the array, or its spec.
        size: the number of allowed values, which are 0 to size - 1.
        owner: the reason for the size, such as "the model's output has 10 classes".
        advice: the advice about a value outside of the range.
        ignored: a value that is allowed nevertheless, or None.
        of_labels: whether these are labels, which may have any value where their weight is 0.
        masks_zero: whether 0 means padding, which the model masks.
    """

    name: str
    values: Any
    size: int
    owner: str
    advice: str
    ignored: int | None = None
    of_labels: bool = False
    masks_zero: bool = False


def find_limits(model: keras.Model, batch: Nest) -> list[Limit]:
    """Returns the limits of a batch's labels and ids, which follow from the model and its loss.

    A user's model or layer may change its inputs, so the inputs of such code have no limits.

    Args:
        model: the built model.
        batch: a batch of arrays or of specs, `(x, y, sample_weight)` or fewer.
    """
    if (isinstance(batch, tuple) and len(batch) > 3) or not _is_known(model, "call", "__call__"):
        return []
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return [*_find_label_limits(model, y), *_find_id_limits(model, x)]


def check_ranges(model: keras.Model, batch: Nest) -> None:
    """Raises `UserError` for labels that are not classes, and ids outside the vocabulary.

    An accelerator raises no error for such a label or id.

    Args:
        model: the built model.
        batch: a batch of arrays, `(x, y, sample_weight)` or fewer.
    """
    for _, outside in compare_with_limits(model, batch):
        if outside:
            raise UserError(f"{outside}.")


def check_classes(model: keras.Model, batch: Nest, classes: int) -> None:
    """Raises `UserError` if the model's output has fewer classes than the labels.

    Args:
        model: the built model.
        batch: the specs of a batch, `(x, y, sample_weight)` or fewer.
        classes: the number of classes of the labels.
    """
    of_labels = [limit for limit in find_limits(model, batch) if limit.of_labels]
    # With several labelled outputs, it is unknown which of them the classes belong to.
    for limit in of_labels if len(of_labels) == 1 else ():
        if limit.size < classes:
            raise UserError(
                f"The data have {classes} classes (data.num_classes), but {limit.owner}: give the "
                "model's last layer more units."
            )


def compare_with_limits(model: keras.Model, batch: Nest) -> Iterator[tuple[Limit, str]]:
    """Yields each limit of a batch with a text about the values outside of it, or "" if none are.

    Limits of token labels are left out if the model may mask tokens: the masks are not known yet.

    Args:
        model: the built model.
        batch: a batch of arrays, `(x, y, sample_weight)` or fewer.
    """
    masks = any(map(_can_mask, keras_internals.list_layers(model)))
    for limit in find_limits(model, batch):
        of_tokens = limit.of_labels and np.size(limit.values) > len(limit.values)
        if not (masks and of_tokens):
            yield limit, _find_outside(limit, batch)


def describe_damage(model: keras.Model, batch: Nest) -> str:
    """Returns a text about the invalid values of a batch; "" if there are none.

    NaN is reported first, because infinite values may be intended, for example to mask attention.
    Examples with weight 0 are checked as well, because 0 times NaN is NaN.

    Args:
        model: the built model.
        batch: a batch of arrays.
    """
    outside = (_find_outside(limit, batch) for limit in find_limits(model, batch))
    found = (
        _find_holding("NaN", np.isnan, batch),
        *outside,
        _find_holding("infinite", np.isinf, batch),
        *(_find_empty(limit) for limit in find_limits(model, batch) if limit.masks_zero),
    )
    return next(filter(None, found), "")


def _find_empty(limit: Limit) -> str:
    """Returns a text about the examples whose tokens are all padding; otherwise ""."""
    shape = np.shape(limit.values)
    if len(shape) < 2 or shape[1] == 1:  # a single id is a category rather than a text
        return ""
    rows = np.flatnonzero(~np.any(limit.values, axis=tuple(range(1, len(shape)))))
    if not rows.size:
        return ""
    return (
        f"{limit.name} has only padding in {_format_examples(rows, len(limit.values))}. A mean "
        "over its tokens is not finite. If the model computes no such mean, lower the learning rate"
    )


def _find_holding(kind: str, is_kind: Callable[[np.ndarray], np.ndarray], batch: Nest) -> str:
    """Returns a text about the examples with values of a kind, such as NaN; "" if none."""
    for name, values in _iterate_named(batch):
        if np.issubdtype(values.dtype, np.floating):
            rows = _find_rows(is_kind(values))
            if rows.size:
                return f"{name} has {kind} values in {_format_examples(rows, len(values))}"
    return ""


def _find_outside(limit: Limit, batch: Nest) -> str:
    """Returns a text about the values outside of a limit; "" if there are none."""
    weight = batch[2] if isinstance(batch, tuple) and len(batch) == 3 else None
    values = np.asarray(limit.values)
    if values.dtype.kind not in "biuf":
        return ""
    wrong = ~((values >= 0) & (values < limit.size))  # NaN is wrong as well
    if limit.of_labels:
        wrong |= values != np.floor(values)
    if limit.ignored is not None:
        wrong &= values != limit.ignored
    if weight is not None and not keras.tree.is_nested(weight) and limit.of_labels:
        weighed = ops.convert_to_numpy(align(weight, values.shape)) != 0
        if weighed.ndim <= wrong.ndim:
            wrong &= weighed
    rows = _find_rows(wrong)
    if not rows.size:
        return ""
    return (
        f"{limit.name} has the value {values[wrong].flat[0]} in "
        f"{_format_examples(rows, len(values))}, "
        f"and {limit.owner}, so they must be whole numbers from 0 to {limit.size - 1}: "
        f"{limit.advice}"
    )


def _is_known(owner: keras.Layer, *methods: str) -> bool:
    """Returns whether Keras or tftpu, not a user, defines the named methods of a layer or model."""
    found = (getattr(type(owner), method) for method in methods)
    return all((method.__module__ or "").startswith(_KNOWN) for method in found)


def _can_mask(layer: keras.Layer) -> bool:
    """Returns whether a layer may create a mask, which excludes elements from the loss."""
    masks = isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
    return masks or not _is_known(layer, "compute_mask")


def _find_label_limits(model: keras.Model, y: Any) -> Iterator[Limit]:
    outputs = getattr(model, "outputs", None)
    if not outputs or y is None or not getattr(model, "compiled", False):
        return
    if has_own_compute_loss(model):
        return
    terms = keras_internals.list_loss_terms(model)
    names: Any = getattr(model, "output_names", ())
    by_name = dict(zip(names, outputs))
    for term in terms:
        if isinstance(y, dict):
            name, values, output = f"y[{term.name!r}]", y.get(term.name), by_name.get(term.name)
        elif keras.tree.is_nested(y) or len(terms) > 1 or len(outputs) > 1:
            return
        else:
            name, values, output = "y, the labels,", y, outputs[0]
        if values is None or output is None or output.shape[-1] is None:
            continue
        if takes_class_ids(term.loss, len(values.shape), len(output.shape)):
            classes = output.shape[-1]  # Keras's backends allow no other axis for classes
            advice = "give labels such numbers, or the model's last layer more units"
            owner = f"the model's output has {classes} classes"
            yield Limit(
                name, values, classes, owner, advice, find_ignored_class(term.loss), of_labels=True
            )


def _find_id_limits(model: keras.Model, x: Any) -> Iterator[Limit]:
    inputs = getattr(model, "inputs", None) or []
    for layer in keras_internals.list_layers(model) if inputs else ():
        if not isinstance(layer, keras.layers.Embedding) or not _is_known(layer, "call"):
            continue
        places = {
            next((i for i, tensor in enumerate(inputs) if tensor is source), -1)
            for source in keras_internals.list_symbolic_inputs(layer)
        }
        # -1: the layer's input may be a computed tensor
        for place in () if -1 in places else sorted(places):
            name, values = _find_feature(x, place, inputs)
            if values is not None:
                advice = "the tokenizer's vocabulary may be larger than the model's"
                owner = f"the layer {layer.name!r} has {layer.input_dim}"
                yield Limit(
                    *(name, values, layer.input_dim, owner, advice), masks_zero=layer.mask_zero
                )


def _find_feature(x: Any, place: int, inputs: list[Any]) -> tuple[str, Any]:
    """Returns the name and the values of the feature for an input; the values may be None."""
    if isinstance(x, dict):
        return f"x[{inputs[place].name!r}]", x.get(inputs[place].name)
    flat = keras.tree.flatten(x)
    name = f"x[{place}]" if len(flat) > 1 else "x"
    return name, flat[place] if len(flat) == len(inputs) else None


def _iterate_named(batch: Nest) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name, such as "x", and the values of each array of a batch."""
    given = batch if isinstance(batch, tuple) else (batch,)
    heads = ("x", "y", "sample_weight") if len(given) <= 3 else None
    for path, values in keras.tree.flatten_with_path(given):
        head = heads[path[0]] if heads else f"batch[{path[0]}]"
        yield head + "".join(f"[{key!r}]" for key in path[1:]), np.asarray(values)


def _find_rows(wrong: np.ndarray) -> np.ndarray:
    """Returns the indices of the examples with a True value; `wrong`: (examples, ...)."""
    return np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))


def _format_examples(rows: np.ndarray, count: int) -> str:
    """Returns a text about the examples, such as "the examples 3, 17 (2 of 64)"."""
    shown = ", ".join(map(str, rows[:_SHOWN])) + (", …" if len(rows) > _SHOWN else "")
    return f"the example{'s' if len(rows) > 1 else ''} {shown} ({len(rows)} of {count})"
