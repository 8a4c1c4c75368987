"""The order of training examples, as a function of the seed and the position alone.

Position p of the endless stream of examples lies in epoch p // count, and is example
shuffle(p % count) there, by a permutation that the run's seed and the epoch make. Step k takes the
positions from k x global_batch on. So a run that goes on from step k sees exactly what it would
have seen, no example twice and none left out, and nothing has to be read to get there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError


@dataclasses.dataclass
class Training:
    """An endless, shuffled, batched dataset that can start at any step.

    Args:
        examples: NumPy arrays, nested at will, whose first dimension counts the examples. They
            lie in host memory: one gather makes a batch.
        global_batch: examples a step.
        seed: of the order and of the augmentation.
        prepare: (a batch of examples, seeds (batch, 2), int32) -> a batch as the model takes it.
            The seeds are random numbers that depend on the run's seed, the epoch and the example
            alone.
    """

    examples: Any
    global_batch: int
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
        if self.global_batch % hosts:
            raise UserError(
                f"A global batch of {self.global_batch} cannot be shared by {hosts} hosts."
            )
        share = self.global_batch // hosts
        examples = tf.nest.map_structure(tf.constant, self.examples)
        places = tf.constant(np.arange(share) + host * share, tf.int64)

        def batch(step: tf.Tensor) -> Any:
            positions = step * self.global_batch + places
            epochs = positions // self.count
            run = tf.fill((share,), tf.constant(self.seed, tf.int64))
            order = tf.cast(tf.stack([run, epochs, epochs], axis=1), tf.int32)
            # A Feistel network: the shuffled place of any index, without the others. (Its wrapper
            # in tf.random takes no seed for each index.)
            index = tf.raw_ops.RandomIndexShuffle(
                index=positions % self.count,
                seed=order,
                max_index=tf.constant(self.count - 1, tf.int64),
                rounds=8,
            )
            words = tf.bitcast(tf.stack([run, epochs, index], axis=1), tf.uint8)
            hashed = tf.fingerprint(tf.reshape(words, (share, -1)))  # (batch, 8), uint8
            seeds = tf.bitcast(tf.reshape(hashed, (share, 2, 4)), tf.int32)
            chosen = tf.nest.map_structure(lambda array: tf.gather(array, index), examples)
            return self.prepare(chosen, seeds)

        return tf.data.Dataset.range(step, tf.int64.max).map(
            batch, num_parallel_calls=2, deterministic=True
        )
