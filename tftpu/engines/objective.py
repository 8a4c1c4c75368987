"""What a compiled Keras model is trained to minimise, as pure functions of one microbatch.

Keras reduces a loss to its mean over the batch in hand, which on eight replicas is eight means.
Here every loss is a sum over elements, divided once by a divisor of the *global* batch, so that
the parts may be added up over microbatches and replicas.
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tftpu.engines.tensorflow import internals
from tftpu.errors import UserError

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Elements(NamedTuple):
    """One loss over one microbatch: its values, the weight of each, and what each counts."""

    values: tf.Tensor  # (batch, ...), float32
    weight: tf.Tensor | None  # same shape; None: all ones
    count: tf.Tensor | None  # same shape, what is summed to the divisor; None: all ones


class Objective:
    """The losses and metrics of a compiled and built model.

    The divisor of a loss is what its `reduction` says, over the global batch: with
    "sum_over_batch_size" and "mean" the number of elements that no mask hides, with
    "mean_with_sample_weight" the sum of their weights, with "sum" 1.

    Args:
        model: compiled and built.

    Raises:
        UserError: a loss without a reduction, or a metric that cannot be added up over replicas.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.terms = internals.loss_terms(model)
        self.metrics = internals.bound_metrics(model)
        self.metric_variables = [v for m in self.metrics for v in m.metric.variables]
        for term in self.terms:
            if term.loss.reduction not in (*MEANS, "sum"):
                raise UserError(
                    f"The loss {term.name!r} has reduction={term.loss.reduction!r}: use one of "
                    f"{', '.join(MEANS)} or sum, so that it is one number a step."
                )
        for bound in self.metrics:
            # Replicas add up their states, which is right for sums and counts alone.
            if any(v.numpy().any() for v in bound.metric.variables):
                raise UserError(
                    f"The metric {bound.metric.name!r} has a state that does not start at zero, so "
                    "it cannot be added up over replicas: use a metric made of sums and counts."
                )

    def elements(
        self, y: Any, y_pred: Any, sample_weight: Any, valid: Any, factors: tuple | None = None
    ) -> list[Elements]:
        """Every loss, element by element.

        Args:
            y, y_pred, sample_weight: as for `keras.Model.compute_loss`, one microbatch.
            valid: (batch,) 1.0 for real examples and 0.0 for padding; None: all are real.
            factors: hidden states and matrix that y_pred is the product of, if they are known.
        """
        if not self.terms:
            return []
        matched = internals.match_losses(self.model, y, y_pred, sample_weight)
        return [_elements(term, *parts, valid, factors) for term, parts in zip(self.terms, matched)]

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any, valid: Any) -> None:
        """Updates every metric; within a `keras.StatelessScope` the scope keeps the new states."""
        if not self.metrics:
            return
        y = internals.flatten_outputs(self.model, y)
        y_pred = internals.flatten_outputs(self.model, y_pred)
        weights = [None] * len(y)
        if sample_weight is not None:
            weights = internals.flatten_outputs(self.model, sample_weight)
            weights = weights if len(weights) == len(y) else weights[:1] * len(y)
        for metric, output, weighted in self.metrics:
            self._refuse_scalar(metric, y[output], y_pred[output])
            weight = weights[output] if weighted else None
            if valid is not None:
                weight = valid if weight is None else weight * _align(valid, weight.shape)
            if weight is None:
                metric.update_state(y[output], y_pred[output])
            else:
                metric.update_state(y[output], y_pred[output], sample_weight=weight)

    def _refuse_scalar(self, metric: keras.Metric, y: tf.Tensor, y_pred: tf.Tensor) -> None:
        values = internals.metric_values(metric, y, y_pred)
        if values is not None and values.shape.rank == 0:
            raise UserError(
                f"The metric {metric.name!r} returns one number for the whole batch. Return one "
                "value an example, as (batch,): padding could not be left out otherwise."
            )


def divisor(term: internals.Term, elements: Elements, replicas: int) -> float | tf.Tensor:
    """What one replica's elements add to the global divisor of a loss.

    A Python number where it does not depend on the data, so that the usual case needs no
    communication before the backward pass.
    """
    if term.loss.reduction == "sum":
        return 1.0 / replicas
    if elements.count is None:
        return float(math.prod(elements.values.shape))
    return tf.reduce_sum(elements.count)


def _elements(term: internals.Term, y, y_pred, sample_weight, valid, factors) -> Elements:
    mask = internals.keras_mask(y_pred)
    y, y_pred = (
        keras.tree.map_structure(lambda t: keras.ops.convert_to_tensor(t, term.loss.dtype), part)
        for part in (y, y_pred)
    )
    if factors is not None and hasattr(term.loss, "call_factored"):
        values = term.loss.call_factored(y, y_pred, *factors)
    else:
        values = term.loss.call(y, y_pred)
    out_mask = internals.keras_mask(values)
    values = tf.cast(values, tf.float32)
    if values.shape.rank == 0:
        raise UserError(
            f"The loss {term.name!r} returns one number for the whole batch. Return one value an "
            "example, as (batch,), and leave the mean to tftpu: it knows the global batch."
        )
    count = _product(values.shape, mask, out_mask, valid)
    weight = _product(values.shape, mask, out_mask, valid, sample_weight)
    if term.loss.reduction == "mean_with_sample_weight":
        count = weight
    return Elements(values, weight, count)


def weighted_sum(elements: Elements) -> tf.Tensor:
    """The sum of the values times their weights."""
    if elements.weight is None:
        return tf.reduce_sum(elements.values)
    return tf.reduce_sum(elements.values * elements.weight)


def _product(shape: tf.TensorShape, *factors) -> tf.Tensor | None:
    """The product of masks and weights of lower rank, broadcast to `shape`; None: all ones."""
    factors = [_align(factor, shape) for factor in factors if factor is not None]
    if not factors:
        return None
    return tf.broadcast_to(math.prod(factors[1:], start=factors[0]), shape)


def _align(weight: Any, shape: tf.TensorShape) -> tf.Tensor:
    """A weight of (batch,), (batch, 1) or (batch, time) with as many dimensions as `shape`."""
    weight = tf.cast(weight, tf.float32)
    if weight.shape.rank > len(shape) and weight.shape[-1] == 1:
        weight = tf.squeeze(weight, -1)
    while weight.shape.rank < len(shape):
        weight = weight[..., None]
    return weight
