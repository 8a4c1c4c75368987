"""A vector of sums on each replica; the host reads the total over all replicas."""

from typing import Any

import numpy as np
import tensorflow as tf


class Accumulator:
    """A float32 vector on each replica.

    Args:
        size: the length of the vector.
        name: the name of the variable.
    """

    def __init__(self, size: int, name: str):
        self._vector: Any = tf.Variable(
            tf.zeros(size),
            trainable=False,
            name=name,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def add(self, vector: tf.Tensor) -> None:
        """Adds to this replica's vector, in replica context."""
        self._vector.assign_add(vector)

    def drain(self) -> np.ndarray:
        """Returns the sums over all replicas, float64, and sets them to zero."""
        sums = self._vector.read_value()
        self._vector.assign(tf.zeros_like(sums))
        return sums.numpy().astype(np.float64)
