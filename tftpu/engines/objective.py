"""The objective of a compiled Keras model, as pure functions of one microbatch.

Keras reduces a loss to its mean over the local batch, which on eight replicas is eight means.
Here every loss is a sum over elements, divided once by a divisor of the *global* batch, so that
the parts can be added up over microbatches and replicas. Written in `keras.ops`: every engine
uses it.
"""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras

from tftpu.engines import keras_internals
from tftpu.errors import UserError
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.tensors import Nest, Tensor, ops

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@runtime_checkable
class FactoredModel(Protocol):
    """A model whose logits are a matrix product, which a loss can compute in chunks."""

    def factored_logits(self, x: Nest, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits, and the factors `hidden` and `matrix` that they are a product of.

        Args:
            x: features of a batch.
            training: as for the model itself.

        Returns:
            logits: (batch, time, vocabulary), float32.
            hidden: (batch, time, width), in the compute dtype.
            matrix: (vocabulary, width).
        """
        ...


class Outputs(NamedTuple):
    """Outputs of a model for one microbatch.

    Attributes:
        y_pred: the predictions.
        factors: the factors of the logits; None if the model has none.
    """

    y_pred: Nest
    factors: tuple[Tensor, Tensor] | None


class Elements(NamedTuple):
    """One loss over one microbatch, element by element.

    Attributes:
        values: (batch, ...), float32.
        weight: the weight of each element, of the same shape; None: all are 1.
        count: the summands of the divisor, of the same shape; None: all are 1.
    """

    values: Tensor
    weight: Tensor | None
    count: Tensor | None  # pyright: ignore[reportIncompatibleMethodOverride]  # hides tuple.count


def call(model: keras.Model, x: Nest, training: bool) -> Outputs:
    """Calls a model, with the factors of its logits where it has them."""
    if isinstance(model, FactoredModel):
        logits, hidden, matrix = model.factored_logits(x, training)
        return Outputs(logits, (hidden, matrix))
    return Outputs(model(x, training=training), None)


class Objective:
    """The losses and metrics of a compiled and built model.

    The divisor of a loss is what its `reduction` says, over the global batch: the number of
    unmasked elements for "sum_over_batch_size" and "mean", the sum of their weights for
    "mean_with_sample_weight", and 1 for "sum".

    Args:
        model: compiled and built.

    Raises:
        UserError: a loss without a reduction, or a metric that cannot be added up over replicas.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.terms = keras_internals.loss_terms(model)
        self.metrics = keras_internals.bound_metrics(model)
        self.metric_variables = [v for m in self.metrics for v in m.metric.variables]
        for term in self.terms:
            if term.loss.reduction not in (*MEANS, "sum"):
                raise UserError(
                    f"The loss {term.name!r} has reduction={term.loss.reduction!r}: use one of "
                    f"{', '.join(MEANS)} or sum, so that it is one number per step."
                )
        for bound in self.metrics:
            # Replicas add up their states, which is correct only for sums and counts.
            if any(v.numpy().any() for v in bound.metric.variables):
                raise UserError(
                    f"The metric {bound.metric.name!r} has a state that does not start at zero, so "
                    "it cannot be added up over replicas: use a metric made of sums and counts."
                )

    def elements(
        self, outputs: Outputs, y: Nest, sample_weight: Nest, valid: Tensor | None
    ) -> list[Elements]:
        """Returns every loss, element by element.

        Args:
            outputs: of the model, for one microbatch.
            y, sample_weight: as for `keras.Model.compute_loss`.
            valid: (batch,), 1.0 for examples and 0.0 for padding; None: all are examples.
        """
        if not self.terms:
            return []
        matched = keras_internals.match_losses(self.model, y, outputs.y_pred, sample_weight)
        return [
            _elements(term, *parts, valid, outputs.factors)
            for term, parts in zip(self.terms, matched)
        ]

    def update_metrics(
        self, y: Nest, y_pred: Nest, sample_weight: Nest, valid: Tensor | None
    ) -> None:
        """Updates every metric; inside a `keras.StatelessScope` the scope keeps the new states."""
        if not self.metrics:
            return
        y = keras_internals.flatten_outputs(self.model, y)
        y_pred = keras_internals.flatten_outputs(self.model, y_pred)
        weights: list[Tensor | None] = [None] * len(y)
        if sample_weight is not None:
            given = keras_internals.flatten_outputs(self.model, sample_weight)
            weights = [*given] if len(given) == len(y) else given[:1] * len(y)
        for metric, output, weighted in self.metrics:
            _refuse_scalar(metric, y[output], y_pred[output])
            weight = weights[output] if weighted else None
            if valid is not None:
                weight = valid if weight is None else weight * _align(valid, weight.shape)
            if weight is None:
                metric.update_state(y[output], y_pred[output])
            else:
                metric.update_state(y[output], y_pred[output], sample_weight=weight)


def divisor(term: keras_internals.Term, elements: Elements, shares: int) -> Any:
    """Returns the summand of one share's elements in the global divisor of a loss.

    It is a Python float if it does not depend on the data, so that the usual case needs no
    communication before the backward pass; otherwise it is a scalar tensor.

    Args:
        term: the loss.
        elements: of one share, or of one microbatch.
        shares: number of data shares.
    """
    if term.loss.reduction == "sum":
        return 1.0 / shares
    if elements.count is None:
        return float(math.prod(elements.values.shape))
    return ops.sum(elements.count)


def weighted_sum(elements: Elements) -> Tensor:
    """Returns the sum of the values times their weights."""
    if elements.weight is None:
        return ops.sum(elements.values)
    return ops.sum(elements.values * elements.weight)


def _elements(
    term: keras_internals.Term,
    y: Tensor,
    y_pred: Tensor,
    sample_weight: Tensor | None,
    valid: Tensor | None,
    factors: tuple[Tensor, Tensor] | None,
) -> Elements:
    mask = keras_internals.keras_mask(y_pred)
    y, y_pred = (
        keras.tree.map_structure(lambda t: ops.convert_to_tensor(t, term.loss.dtype), part)
        for part in (y, y_pred)
    )
    if factors is not None and isinstance(term.loss, SmoothedCrossentropy):
        values = term.loss.call_factored(y, y_pred, *factors)
    else:
        values = term.loss.call(y, y_pred)
    out_mask = keras_internals.keras_mask(values)
    values = ops.cast(values, "float32")
    if len(values.shape) == 0:
        raise UserError(
            f"The loss {term.name!r} returns one number for the whole batch. Return one value an "
            "example, of shape (batch,), and leave the mean to tftpu: it knows the global batch."
        )
    count = _product(values.shape, mask, out_mask, valid)
    weight = _product(values.shape, mask, out_mask, valid, sample_weight)
    if term.loss.reduction == "mean_with_sample_weight":
        count = weight
    return Elements(values, weight, count)


def _refuse_scalar(metric: keras.Metric, y: Tensor, y_pred: Tensor) -> None:
    values = keras_internals.metric_values(metric, y, y_pred)
    if values is not None and len(values.shape) == 0:
        raise UserError(
            f"The metric {metric.name!r} returns one number for the whole batch. Return one "
            "value per example, of shape (batch,): padding could not be left out otherwise."
        )


def _product(shape: tuple[int, ...], *factors: Tensor | None) -> Tensor | None:
    """Returns the product of masks and weights of lower rank, broadcast to `shape`.

    None if there are no factors, where the product would be all ones.
    """
    aligned = [_align(factor, shape) for factor in factors if factor is not None]
    if not aligned:
        return None
    return ops.broadcast_to(math.prod(aligned[1:], start=aligned[0]), shape)


def _align(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a weight of (batch,), (batch, 1) or (batch, time) with as many axes as `shape`."""
    weight = ops.cast(weight, "float32")
    if len(weight.shape) > len(shape) and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, -1)
    while len(weight.shape) < len(shape):
        weight = weight[..., None]
    return weight
