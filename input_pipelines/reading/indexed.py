"""Examples with random access: arrays, files of images."""

from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.reading import order
from tftpu.input_pipelines.tensors import Tensor, skip_autograph


class IndexedRecords:
    """Examples by number; each epoch is one permutation of all of them (see `order`).

    A record is its number: the pipeline's `parse` fetches the example.

    Args:
        paths: the path of each example's file, (examples,), string; at least one.
        state: a JSON value that changes with the files.
    """

    def __init__(self, paths: Tensor, state: Any = None):
        self.count = int(tf.size(paths))
        if not self.count:
            raise UserError("The data set has no examples.")
        self._paths = paths
        self.state = state

    def describe_records(self, numbers: Tensor) -> Tensor:
        """Returns the names of examples for error messages: the paths of their files."""
        return tf.gather(self._paths, numbers)

    def explain_loss(self, number: int) -> str:
        """Returns "", because a record is a number and is never lost."""
        return ""

    def draw_records(
        self, global_batch_size: int, seed: int, step: int, host: int = 0, hosts: int = 1
    ) -> tf.data.Dataset:
        """Returns one host's examples of each global batch, from a step on.

        Returns:
            An endless dataset of (records (n,), numbers (n,), seeds (n, 2)), with n =
            `global_batch_size` // `hosts`; records and numbers are equal.
        """
        share = global_batch_size // hosts
        places = tf.constant(np.arange(share) + host * share, tf.int64)

        def batch(step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            numbers, seeds = draw(self.count, seed, step * global_batch_size + places)
            return numbers, numbers, seeds

        return tf.data.Dataset.range(step, tf.int64.max).map(batch)

    def iterate_once(self) -> tf.data.Dataset:
        """Returns a dataset of (record, number) for each record, in order; the two are equal."""
        return tf.data.Dataset.range(self.count).map(lambda number: (number, number))

    def read_range(self, first: Tensor, last: Tensor, size: int) -> tf.data.Dataset:
        """Returns batches of (record, number), the two equal; see `pipeline.RecordSource`."""

        def batch(begin: Tensor) -> tuple[Tensor, Tensor]:
            numbers = tf.minimum(begin + tf.range(size, dtype=tf.int64), last - 1)
            return numbers, numbers

        return tf.data.Dataset.range(first, last, size).map(batch)


@skip_autograph
def draw(count: int, seed: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the examples at positions of the endless stream, and their seeds.

    Args:
        count: the number of examples in an epoch.
        seed: the seed of the run.
        positions: the positions in the stream, (n,), int64.

    Returns:
        The examples' numbers (n,), int64, and seeds (n, 2), int32.
    """
    epochs = positions // count
    run = tf.fill(tf.shape(positions), tf.constant(seed, tf.int64))
    key = tf.cast(tf.stack([run, epochs, epochs], axis=1), tf.int32)
    numbers = order.permute_places(positions % count, count, key)
    return numbers, order.derive_seeds(run, epochs, numbers)
