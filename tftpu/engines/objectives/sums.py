"""The layout of a vector with the sums of losses and metrics over steps, and their means.

Each replica adds up its own vector on its device. The replicas' vectors are added up when the host
reads them, once per device loop rather than once per step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from tftpu.engines.names import remove_counters
from tftpu.engines.objectives.losses import Losses, Term
from tftpu.engines.objectives.parameter_groups import ParameterGroup
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops


class GroupSums(NamedTuple):
    """The summands of one objective in the sums of a training step, on one replica.

    Attributes:
        taken: 1.0 if the objective changed its variables; 0.0 if it was not due, or overflowed.
        losses: this replica's summands of the total loss and of each term, each ().
    """

    taken: Tensor
    losses: list[Tensor]


class _Sums:
    """The layout of a vector: some leading values, followed by the states of all metrics.

    Args:
        losses: the losses of each objective.
        leading: the number of values before the states of the metrics.
    """

    def __init__(self, losses: Sequence[Losses], leading: int):
        self._losses = losses
        self._terms = [term for one in losses for term in one.terms]
        self._variables = [v for one in losses for v in one.metric_variables]
        self._sizes = [int(np.prod(v.shape)) for v in self._variables]
        self.size = leading + sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """The names of terms and of metrics' states. Only sums with equal names can be added."""
        paths = [variable.path for variable in self._variables]
        names = [*(term.name for term in self._terms), *paths]
        return [remove_counters(name) for name in names]

    def _flatten_values(self, values: list[Tensor]) -> Tensor:
        return ops.concatenate([ops.reshape(ops.cast(v, "float32"), (-1,)) for v in values])

    def _read_metrics(self, flat: np.ndarray) -> dict[str, float]:
        """Returns the results of the metrics from their concatenated states."""
        parts = np.split(flat, np.cumsum(self._sizes)[:-1])
        values = [
            ops.convert_to_tensor(part.reshape(v.shape), v.dtype)
            for part, v in zip(parts, self._variables)
        ]
        found: dict[str, float] = {}
        with keras.StatelessScope(state_mapping=list(zip(self._variables, values))):
            for one in self._losses:
                for name, value in one.compute_metric_results().items():
                    found[name] = _check_number(name, value)
        return found


class TrainSums(_Sums):
    """The layout of the sums of training steps.

    Its order: steps, gradient norm, skipped steps, each objective's steps and losses, metrics. A
    step with a smaller batch counts as a fraction of a step.

    Args:
        groups: the objectives.
    """

    def __init__(self, groups: Sequence[ParameterGroup]):
        losses = [group.losses for group in groups]
        super().__init__(losses, 3 + sum(2 + len(one.terms) for one in losses))
        self._may_skip = any(group.scaler is not None for group in groups)

    def build_vector(
        self,
        shards: int,
        norm: Tensor,
        skipped: Tensor,
        groups: Sequence[GroupSums],
        metrics: list[Tensor],
    ) -> Tensor:
        """Returns the summands of one step on one replica, (size,), float32.

        Args:
            shards: number of data shards.
            norm, skipped: the norm of the gradient, and 1.0 for a skipped step; equal on all
                replicas.
            groups: the sums of each objective.
            metrics: the states of the metrics for this replica's examples.
        """
        shared = [value / shards for value in (ops.ones(()), norm, skipped)]
        each = [value for group in groups for value in (group.taken / shards, *group.losses)]
        return self._flatten_values([*shared, *each, *metrics])

    def scale(self, sums: np.ndarray, weight: float) -> np.ndarray:
        """Multiplies the sums of a smaller batch by its size relative to a complete batch.

        The states of metrics do not change, because they count the examples themselves.
        """
        means = self.size - sum(self._sizes)
        return np.concatenate([sums[:means] * weight, sums[means:]])

    def has_only_skipped(self, sums: np.ndarray) -> bool:
        """Returns whether all steps were skipped because a gradient overflowed."""
        return bool(sums[2] == sums[0])

    def is_finite(self, sums: np.ndarray) -> bool:
        """Returns whether all losses and gradients were finite, regardless of metrics."""
        losses = [loss for _, loss, _ in self._read_parts(sums)]
        return bool(np.isfinite([sums[1], *losses]).all())

    def compute_loss(self, sums: np.ndarray) -> float:
        """Returns the mean of the loss, without computing the metrics; NaN without summands."""
        skipped = self.has_only_skipped(sums)
        # An objective that trained in none of these steps has no loss.
        means = [
            _compute_mean(loss, taken)
            for taken, loss, _ in self._read_parts(sums)
            if taken or skipped
        ]
        return sum(means) if means else float("nan")

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """Returns the means of the loss, its terms and the metrics, under Keras's names.

        A mean is NaN if it has no summands, for example because all steps overflowed.
        """
        results, parts = {"loss": self.compute_loss(sums)}, self._read_parts(sums)
        for one, (taken, _, terms) in zip(self._losses, parts):
            named = zip(one.terms, terms)
            results.update(
                {t.logged: _compute_mean(value, taken) for t, value in named if t.logged}
            )
        metrics = self._read_metrics(sums[len(sums) - sum(self._sizes) :])
        seen = any(taken for taken, *_ in parts)
        results.update({name: value if seen else np.nan for name, value in metrics.items()})
        return results

    def read_gradients(self, sums: np.ndarray) -> dict[str, float]:
        """Returns the mean gradient norm and, with a dynamic loss scale, the number of skips."""
        steps, norm, skipped = sums[:3]
        results = {"grad_norm": _compute_mean(norm, steps - skipped)}
        if self._may_skip:
            results["skipped_steps"] = float(skipped)
        return results

    @property
    def result_names(self) -> list[str]:
        """The names of the results of an epoch."""
        return list(self.read(np.zeros(self.size)))

    def _read_parts(self, sums: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
        """Returns `(steps, loss, terms)` of each objective, which are sums."""
        parts, start = [], 3
        for one in self._losses:
            end = start + 2 + len(one.terms)
            parts.append((sums[start], sums[start + 1], sums[start + 2 : end]))
            start = end
        return parts


class EvalSums(_Sums):
    """The layout of an evaluation's sums: examples, added losses, terms, divisors and metrics.

    Args:
        losses: the losses of each objective.
    """

    def __init__(self, losses: Sequence[Losses]):
        super().__init__(losses, 2 + 2 * sum(len(one.terms) for one in losses))

    def build_vector(
        self,
        examples: Tensor,
        added: Tensor,
        sums: list[Tensor],
        counts: list[Tensor],
        metrics: list[Tensor],
    ) -> Tensor:
        """Returns the summands of one batch on one replica, (size,), float32.

        Args:
            examples: number of examples of this replica's shard.
            added: the sum of the losses that layers and regularizers add, ().
            sums, counts: the weighted sum and the divisor of each term.
            metrics: the states of the metrics for this replica's examples.
        """
        return self._flatten_values([examples, added * examples, *sums, *counts, *metrics])

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """Returns the loss, its terms and the metrics over all examples in the sums."""
        examples, added, *rest = sums
        count = len(self._terms)
        values, counts = np.array(rest[:count]), np.array(rest[count : 2 * count])
        weights = np.array([term.factor for term in self._terms])
        means = np.where(weights != 0, values / np.maximum(counts, 1e-30), 0.0)
        loss = float(weights @ means)
        results = {"loss": loss + float(added / max(examples, 1))}
        results.update(_compute_logged(self._terms, values, counts))
        results.update(self._read_metrics(np.array(rest[2 * count :])))
        return results

    @property
    def result_names(self) -> list[str]:
        """The names of the results of an evaluation."""
        return list(self.read(np.zeros(self.size)))


def _compute_mean(total: float, count: float) -> float:
    """Returns a mean; NaN if the count is 0."""
    return float(total / count) if count else float("nan")


def _check_number(name: str, value: Tensor) -> float:
    """Returns the result of a metric; raises `UserError` if it is not one number."""
    result = ops.convert_to_numpy(value)
    if result.size != 1:
        raise UserError(
            f"The metric {name!r} returns {result.size} numbers, but tftpu logs one number: let "
            "the metric return their mean, as in F1Score(average='macro')."
        )
    return float(result.reshape(()))


def _compute_logged(
    terms: Sequence[Term], sums: np.ndarray, counts: np.ndarray
) -> dict[str, float]:
    """Returns the means of the terms that are logged separately from the total."""
    means = sums / np.maximum(counts, 1e-30)
    return {term.logged: float(mean) for term, mean in zip(terms, means) if term.logged}
