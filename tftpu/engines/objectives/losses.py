"""Losses as sums over elements, for every kind of objective.

Keras reduces a loss to its mean over the local batch, so eight replicas compute eight means. Here
every loss is a sum over elements, divided once by a divisor of the *global* batch, so that the sums
of microbatches and replicas can be added up. The module uses only `keras.ops`, so every engine can
use it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from tftpu.optim.chunked import Chunked
from tftpu.tensors import Nest, Tensor, ops

MEAN = "sum_over_batch_size"
FIELDS = ("step", "split", "time")  # the names of each record's own values in `metrics.jsonl`
# Names of values that every run logs, which no loss or metric may have.
RESERVED = (
    *("loss", "grad_norm", "weight_norm", "learning_rate", "skipped_steps", "examples_per_sec"),
    *FIELDS,
)


class Term(NamedTuple):
    """One summand of an objective, or a value that is only logged.

    Attributes:
        name: the name as Keras logs the loss.
        reduction: the reduction of the elements, as `keras.losses.Loss` names it.
        weight: the factor in the total, a number or a variable; 0 for a value that is logged only.
        logged: the name of the mean in the results; None: the term is not logged separately.
    """

    name: str
    reduction: str
    weight: float | keras.Variable
    logged: str | None

    @property
    def counts(self) -> bool:
        """True if the term is a part of the total."""
        return isinstance(self.weight, keras.Variable) or self.weight != 0

    @property
    def factor(self) -> float:
        """The current value of the weight."""
        return float(ops.convert_to_numpy(self.weight))


class Elements(NamedTuple):
    """The values of one term for each element of a microbatch, such as an example or a token.

    Attributes:
        values: the values, (batch, ...), float32; or (), if the loss itself returns a mean over the
            microbatch.
        weight: the weight of each element, of the same shape; None: all are 1.
        count: the summands of the divisor, of the same shape; None: all are 1.
        factor: the value of the term's weight if that is a variable, (); None: not a variable.
        whole: whether values of shape () are those of the whole global batch.
        chunked: the results of `chunked_crossentropy`; None: the logits are not in chunks.
        total: the weighted sum of the values, if gradients flow through it and not through
            `values`; None: they flow through `values`.
    """

    values: Tensor
    weight: Tensor | None = None
    count: Tensor | None = None  # pyright: ignore[reportIncompatibleMethodOverride]  # hides tuple.count
    factor: Tensor | None = None
    whole: bool = False
    chunked: Chunked | None = None
    total: Tensor | None = None

    @property
    def is_scalar(self) -> bool:
        """True if the loss itself returns one number for the microbatch."""
        return len(self.values.shape) == 0


class Computed(NamedTuple):
    """The losses of one microbatch.

    Attributes:
        y_pred: the outputs of the model; None for a loss function, which does not return them.
        elements: the elements of each term.
        added: the sum of the model's own losses, which are means over the microbatch, ().
        separable: whether padding can be ignored, because no result depends on it.
    """

    y_pred: Nest
    elements: list[Elements]
    added: Tensor
    separable: bool


class Losses(Protocol):
    """The losses and metrics of a model, as pure functions of one microbatch."""

    @property
    def terms(self) -> list[Term]:
        """The terms, in the order of `Computed.elements`."""
        ...

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """The states of the metrics, which `compute` updates."""
        ...

    @property
    def unknown_metrics(self) -> bool:
        """True if a metric is not one of Keras's, so its states may not be sums."""
        ...

    def compute(
        self, batch: Nest, training: bool, valid: Tensor | None, own: Callable[[], list[Tensor]]
    ) -> Computed:
        """Calls the model and computes its losses; called in a `keras.StatelessScope`.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`, or any batch that a loss function takes.
            training: whether the model trains, as for Keras's `call`.
            valid: 1.0 for examples and 0.0 for padding, (batch,); None: no padding.
            own: a function that returns the losses that layers have added so far.
        """
        ...

    def compute_outputs(self, batch: Nest) -> Nest:
        """Returns the results of the forward pass alone, as in evaluation."""
        ...

    def compute_metric_results(self) -> dict[str, Tensor]:
        """Returns the results of the metrics; called in a scope that holds their states."""
        ...


def compute_shard_divisor(
    term: Term, elements: Elements, shards: int, microbatches: int = 1
) -> Any:
    """Returns the contribution of a shard or a microbatch to the global divisor of a term.

    It is a Python float if it does not depend on the data, so that the usual case needs no
    communication before the backward pass; otherwise it is a scalar tensor.

    Args:
        term: the term.
        elements: the elements of one shard, or of one microbatch.
        shards: number of summands of the global divisor.
        microbatches: number of microbatches; the result for a loss of one number per microbatch.
    """
    if elements.is_scalar:
        return float(microbatches)
    if term.reduction == "sum":
        return 1.0 / shards
    if elements.count is None:
        return float(math.prod(elements.values.shape))
    return ops.sum(elements.count)


def sum_weighted(elements: Elements) -> Tensor:
    """Returns the sum of the values times their weights."""
    if elements.total is not None:
        return elements.total
    if elements.weight is None:
        return ops.sum(elements.values)
    return ops.sum(elements.values * elements.weight)


def sum_losses(
    terms: Sequence[Term], computed: Computed, divisors: Sequence[Any], parts: int
) -> tuple[Tensor, list[Tensor]]:
    """Returns a microbatch's summand of the global loss, (), and of each of its terms.

    Args:
        terms: the terms of the loss.
        computed: the losses of the microbatch.
        divisors: the global divisor of each term.
        parts: the number of microbatches in all shards of the global batch.
    """
    values = [
        ops.divide_no_nan(sum_weighted(elements), divisor)
        for elements, divisor in zip(computed.elements, divisors)
    ]
    # An infinite value that is only logged is left out: 0 times infinity is not 0.
    weighted = [
        value * (term.weight if elements.factor is None else elements.factor)
        for value, term, elements in zip(values, terms, computed.elements)
        if term.counts
    ]
    return sum(weighted, start=computed.added / parts), values


def sum_and_count(
    term: Term, elements: Elements, examples: Tensor, batch_size: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a shard's contributions to the sum and the divisor of a term in an evaluation.

    Args:
        term: the term.
        elements: the elements of the shard.
        examples: the number of examples of the shard that are not padding, ().
        batch_size: the number of examples of the global batch that are not padding, ().
    """
    if elements.is_scalar:  # the shard's mean, which stands for each of its examples
        return elements.values * examples, examples
    if term.reduction == "sum":  # Keras multiplies the sum of a batch by its number of examples
        return sum_weighted(elements) * batch_size, examples
    return sum_weighted(elements), ops.convert_to_tensor(
        compute_shard_divisor(term, elements, shards=1), "float32"
    )


def compute_product(shape: tuple[int, ...], *factors: Tensor | None) -> Tensor | None:
    """Returns the product of masks and weights of lower rank, broadcast to `shape`.

    The result is None if there are no factors.
    """
    aligned = [align(factor, shape) for factor in factors if factor is not None]
    if not aligned:
        return None
    return ops.broadcast_to(math.prod(aligned[1:], start=aligned[0]), shape)


def align(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a weight of (batch,), (batch, 1) or (batch, time) with as many axes as `shape`."""
    weight = ops.cast(weight, "float32")
    if len(weight.shape) > len(shape) and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, -1)
    while len(weight.shape) < len(shape):
        weight = weight[..., None]
    return weight


def sum_of_own(model: keras.Model, own: list[Tensor]) -> Tensor:
    """Returns the sum of the losses that layers added, and of the regularizers of weights."""
    total = ops.zeros(())
    for loss in own:
        total = total + ops.sum(ops.cast(loss, "float32"))
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            total = total + ops.cast(variable.regularizer(variable.value), "float32")
    return total


def count_examples(batch: Nest) -> int:
    """Returns the number of examples of a batch of static shape; optional inputs may be None."""
    first = next(part for part in keras.tree.flatten(batch) if part is not None)
    return int((first.shape if hasattr(first, "shape") else np.shape(first))[0])
