"""Training examples that lie in memory: drawn by position (see `order`), gathered a batch at once.

Nothing has to be read to get to a step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import indexed


def share_of_host(global_batch_size: int, hosts: int) -> int:
    """The examples of a global batch that each host holds.

    Raises:
        UserError: the hosts do not divide the global batch.
    """
    if global_batch_size % hosts:
        raise UserError(f"A global batch of {global_batch_size} cannot be shared by {hosts} hosts.")
    return global_batch_size // hosts


@dataclasses.dataclass
class Training:
    """An endless, shuffled, batched dataset that can start at any step.

    Args:
        examples: NumPy arrays, nested at will, whose first dimension counts the examples. They
            lie in host memory: one gather makes a batch.
        global_batch_size: examples a step.
        seed: of the order and of the augmentation.
        prepare: (a batch of examples, seeds (batch, 2), int32) -> a batch as the model takes it.
            The seeds are random numbers that depend on the run's seed, the epoch and the example
            alone.
    """

    examples: Any
    global_batch_size: int
    seed: int
    prepare: Callable

    @property
    def count(self) -> int:
        """Examples of an epoch."""
        return len(tf.nest.flatten(self.examples)[0])

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """The global batches from a step on, or one host's part of each.

        Args:
            step: the first batch.
            host, hosts: which of how many equal, consecutive parts; the parts together are the
                whole batch, in its order.

        Raises:
            UserError: the hosts do not divide the global batch.
        """
        share = share_of_host(self.global_batch_size, hosts)
        examples = tf.nest.map_structure(tf.constant, self.examples)
        places = tf.constant(np.arange(share) + host * share, tf.int64)

        def batch(step: tf.Tensor) -> Any:
            index, seeds = indexed.draw(
                self.count, self.seed, step * self.global_batch_size + places
            )
            chosen = tf.nest.map_structure(lambda array: tf.gather(array, index), examples)
            return self.prepare(chosen, seeds)

        return tf.data.Dataset.range(step, tf.int64.max).map(
            batch, num_parallel_calls=2, deterministic=True
        )
