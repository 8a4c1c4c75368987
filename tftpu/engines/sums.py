"""Sums of losses and metrics over steps: their layout in one vector, and their means.

Each replica adds up its own vector on its device; the vectors are added over replicas when the
host reads them, once per device loop rather than once per step.
"""

import keras
import numpy as np

from tftpu.engines import keras_internals
from tftpu.engines.names import without_counters
from tftpu.engines.objective import Objective
from tftpu.tensors import Tensor, ops


class _Sums:
    """The layout of a vector: some numbers, then the states of all metrics end to end.

    Args:
        objective: its metrics end the vector.
        leading: count of the numbers before them.
    """

    def __init__(self, objective: Objective, leading: int):
        self._objective = objective
        self._sizes = [int(np.prod(v.shape)) for v in objective.metric_variables]
        self.size = leading + sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """Names of the losses and metrics; sums of other names cannot be added to these."""
        paths = [variable.path for variable in self._objective.metric_variables]
        names = [*(term.name for term in self._objective.terms), *paths]
        return [without_counters(name) for name in names]

    def _flat(self, values: list[Tensor]) -> Tensor:
        return ops.concatenate([ops.reshape(ops.cast(v, "float32"), (-1,)) for v in values])

    def _terms(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """Returns the losses of a model with several outputs, named as Keras names them."""
        terms = self._objective.terms
        if len(terms) < 2:
            return {}
        means = sums / np.maximum(counts, 1e-30)
        return {f"{term.name}_loss": float(mean) for term, mean in zip(terms, means)}

    def _metrics(self, flat: np.ndarray) -> dict[str, float]:
        """Returns the results of the metrics whose states are end to end in `flat`."""
        variables = self._objective.metric_variables
        parts = np.split(flat, np.cumsum(self._sizes)[:-1])
        values = [
            ops.convert_to_tensor(part.reshape(v.shape), v.dtype)
            for part, v in zip(parts, variables)
        ]
        with keras.StatelessScope(state_mapping=list(zip(variables, values))):
            results = keras_internals.metric_results(self._objective.model)
            return {name: float(value) for name, value in results.items()}


class TrainSums(_Sums):
    """Steps, gradient norms, skipped steps, the loss, each of its terms, and metrics.

    A step of a smaller batch counts as a part of a step.
    """

    def __init__(self, objective: Objective):
        super().__init__(objective, 4 + len(objective.terms))

    def vector(
        self,
        shares: int,
        norm: Tensor,
        skipped: Tensor,
        losses: list[Tensor],
        metrics: list[Tensor],
    ) -> Tensor:
        """Returns the summands of one step on one replica, (size,), float32.

        Args:
            shares: number of data shares.
            norm, skipped: the gradient's norm, and 1.0 for a skipped step; equal on all replicas.
            losses: this replica's parts of the loss and of each term.
            metrics: states of the metrics for this replica's examples.
        """
        shared = [ops.ones(()), norm, skipped]
        return self._flat([*(value / shares for value in shared), *losses, *metrics])

    def weighted(self, sums: np.ndarray, weight: float) -> np.ndarray:
        """Returns the sums of steps that count for less, as their batches are smaller.

        The states of metrics stay: they count the examples themselves.
        """
        means = self.size - sum(self._sizes)
        return np.concatenate([sums[:means] * weight, sums[means:]])

    def loss(self, sums: np.ndarray) -> float:
        """Returns only the mean of the loss, which costs nothing to compute."""
        steps, _, skipped, loss = sums[:4]
        return float(loss / max(steps - skipped, 1e-30))

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """Returns the means of the loss, its terms, the metrics and the gradient's norm."""
        steps, norm, skipped, _, *rest = sums
        count = len(self._objective.terms)
        taken = max(steps - skipped, 1e-30)
        results = {"loss": self.loss(sums)}
        results.update(self._terms(np.array(rest[:count]), np.full(count, taken)))
        results.update(self._metrics(np.array(rest[count:])))
        results["grad_norm"] = float(norm / taken)
        if skipped:
            results["skipped_steps"] = float(skipped)
        return results


class EvalSums(_Sums):
    """Batches, added losses, the sum and the divisor of each term of the loss, and metrics."""

    def __init__(self, objective: Objective):
        super().__init__(objective, 2 + 2 * len(objective.terms))

    def vector(
        self,
        shares: int,
        added: Tensor,
        sums: list[Tensor],
        counts: list[Tensor],
        metrics: list[Tensor],
    ) -> Tensor:
        """Returns the summands of one batch on one replica, (size,), float32.

        Args:
            shares: number of data shares.
            added: the model's own losses.
            sums, counts: the weighted sum and the divisor of each term.
            metrics: states of the metrics for this replica's examples.
        """
        return self._flat([ops.ones(()) / shares, added / shares, *sums, *counts, *metrics])

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """Returns the loss, its terms and the metrics over all examples summed up."""
        batches, added, *rest = sums
        terms = self._objective.terms
        values, counts = np.array(rest[: len(terms)]), np.array(rest[len(terms) : 2 * len(terms)])
        weights = np.array([term.weight for term in terms])
        loss = float(weights @ (values / np.maximum(counts, 1e-30)))
        results = {"loss": loss + float(added / max(batches, 1))}
        results.update(self._terms(values, counts))
        results.update(self._metrics(np.array(rest[2 * len(terms) :])))
        return results

    @property
    def result_names(self) -> list[str]:
        """Names of the results of an evaluation."""
        return list(self.read(np.zeros(self.size)))
