"""Sums of losses and metrics that stay on the device while a loop runs, and what they mean.

Each replica adds up its own; they are added over replicas when the host reads them, once a device
loop and not once a step.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.checkpoint.matching import uncounted
from tftpu.engines.objective import Objective
from tftpu.engines.tensorflow import internals


class _Totals:
    """One float32 vector on each replica.

    Args:
        objective: whose metrics it ends with.
        size: how many numbers come before those.
    """

    def __init__(self, objective: Objective, size: int, name: str):
        self._objective = objective
        self._sizes = [v.value.shape.num_elements() for v in objective.metric_variables]
        self._vector = tf.Variable(
            tf.zeros(size + sum(self._sizes)),
            trainable=False,
            name=name,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def drain(self) -> np.ndarray:
        """The sums over all replicas, float64, which are set to zero."""
        sums = self._vector.read_value()
        self._vector.assign(tf.zeros_like(sums))
        return sums.numpy().astype(np.float64)

    @property
    def names(self) -> list[str]:
        """Of what is summed up: sums with other names are sums of other things."""
        paths = [variable.path for variable in self._objective.metric_variables]
        names = [*(term.name for term in self._objective.terms), *paths]
        return [uncounted(name) for name in names]

    def _add(self, values: list[tf.Tensor]) -> None:
        flat = [tf.reshape(tf.cast(value, tf.float32), (-1,)) for value in values]
        self._vector.assign_add(tf.concat(flat, 0))

    def _terms(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """The single losses of a model with several outputs, named as Keras names them."""
        terms = self._objective.terms
        if len(terms) < 2:
            return {}
        means = sums / np.maximum(counts, 1e-30)
        return {f"{term.name}_loss": float(mean) for term, mean in zip(terms, means)}

    def _metrics(self, flat: np.ndarray) -> dict[str, Any]:
        """The results of the metrics whose states lie end to end in `flat`."""
        model, variables = self._objective.model, self._objective.metric_variables
        parts = np.split(flat, np.cumsum(self._sizes)[:-1])
        values = [tf.cast(part.reshape(v.shape), v.dtype) for part, v in zip(parts, variables)]
        with keras.StatelessScope(state_mapping=list(zip(variables, values))):
            return {k: float(v) for k, v in internals.metric_results(model).items()}


class TrainTotals(_Totals):
    """Steps, gradient norms, skipped steps, the loss and each term of it, metrics."""

    def __init__(self, objective: Objective):
        super().__init__(objective, 4 + len(objective.terms), "train_totals")

    def add(self, replicas: int, norm, skipped, losses: list, metrics: list) -> None:
        """One step. `norm` and `skipped` are the same on all replicas, the others their shares."""
        shared = [tf.ones(()), norm, skipped]
        self._add([value / replicas for value in shared] + losses + metrics)

    def loss(self, sums: np.ndarray) -> float:
        """The mean of the loss alone, which costs nothing to work out."""
        steps, _, skipped, loss = sums[:4]
        return float(loss / max(steps - skipped, 1))

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """The means of loss, metrics and gradient norm over the steps summed up."""
        steps, norm, skipped, _, *rest = sums
        count = len(self._objective.terms)
        taken = max(steps - skipped, 1)
        results = {"loss": self.loss(sums)}
        results.update(self._terms(np.array(rest[:count]), np.full(count, taken)))
        results.update(self._metrics(np.array(rest[count:])))
        results["grad_norm"] = float(norm / taken)
        if skipped:
            results["skipped_steps"] = float(skipped)
        return results


class EvalTotals(_Totals):
    """Batches, added losses, the sum and the divisor of each term of the loss, metrics."""

    def __init__(self, objective: Objective):
        super().__init__(objective, 2 + 2 * len(objective.terms), "eval_totals")

    def add(self, replicas: int, added, sums: list, counts: list, metrics: list) -> None:
        """One replica's share of one batch."""
        self._add([tf.ones(()) / replicas, added / replicas, *sums, *counts, *metrics])

    def read(self, sums: np.ndarray) -> dict[str, float]:
        """The loss and the metrics over all examples summed up."""
        batches, added, *rest = sums
        count = len(self._objective.terms)
        values, counts = np.array(rest[:count]), np.array(rest[count : 2 * count])
        weights = np.array([term.weight for term in self._objective.terms])
        loss = float(weights @ (values / np.maximum(counts, 1e-30)))
        results = {"loss": loss + float(added / max(batches, 1))}
        results.update(self._terms(values, counts))
        results.update(self._metrics(np.array(rest[2 * count :])))
        return results
