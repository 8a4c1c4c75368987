"""The order of training examples, as a function of the seed, the epoch and the position alone.

Position p of the endless stream of examples lies in epoch p // count; step k takes the positions
from k x global_batch_size on. Each epoch is a permutation of all examples, so no example is read twice
in it and none is left out, and a run that goes on from step k sees what it would have seen.

Where any example can be had at once (arrays, files of images) the permutation is a Feistel network
over all of them (`shuffled`). Where examples stand in a row in files it is made of what can be
reached without reading all that comes before:

1. The shards of an epoch stand in an order of their own, one after another: a row of all examples.
2. The row is cut into `Lanes`. Place j of every global batch is filled from lane j // (G / L), so a
   host, which has some consecutive places of each batch, reads few lanes, and each from one place
   on. The number of hosts is in none of this.
3. A lane is shuffled in windows, each by a Feistel network.

So to get to a step, shards are skipped by their counts, then the index of a shard gives the byte
to go on from, and at most one window is read for nothing.
"""

import dataclasses

import tensorflow as tf

_ROUNDS = 8


def shuffled(places: tf.Tensor, count: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Where a permutation of `count` puts each of the places, without making all of it.

    Args:
        places: (n,), int64, each below `count`.
        count: (), int64, at least 1.
        key: (3,) or (n, 3), int32: which permutation.
    """
    # A Feistel network. (Its wrapper in tf.random takes no seed for each index.)
    return tf.raw_ops.RandomIndexShuffle(
        index=places, seed=key, max_index=tf.cast(count, tf.int64) - 1, rounds=_ROUNDS
    )


def seeds(*words: tf.Tensor) -> tf.Tensor:
    """Random numbers (n, 2), int32, that depend on the words alone, each (n,), int64."""
    words = tf.stack(words, axis=1)
    hashed = tf.fingerprint(tf.reshape(tf.bitcast(words, tf.uint8), (tf.shape(words)[0], -1)))
    return tf.bitcast(tf.reshape(hashed, (-1, 2, 4)), tf.int32)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How the row of an epoch's examples is cut, so that each place of a batch is read from one.

    All numbers are int64 tensors, scalars or vectors.

    Args:
        count: examples of an epoch.
        global_batch_size: examples of a step.
        lanes: a divisor of the global batch.
    """

    count: int
    global_batch_size: int
    lanes: int

    @property
    def width(self) -> int:
        """Consecutive places of a batch that one lane fills."""
        return self.global_batch_size // self.lanes

    def before(self, lane: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        """How many positions of the stream below `position` a lane fills."""
        whole, rest = position // self.global_batch_size, position % self.global_batch_size
        return whole * self.width + tf.clip_by_value(rest - lane * self.width, 0, self.width)

    def runs(self, epoch: tf.Tensor) -> tf.Tensor:
        """(lanes + 1,): the lanes' borders in the row of an epoch; lane l has [l, l + 1)."""
        lane = tf.range(self.lanes, dtype=tf.int64)
        end = self.before(lane, (epoch + 1) * self.count)
        return tf.concat([[0], tf.cumsum(end - self.before(lane, epoch * self.count))], 0)

    def at(self, lane: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The epoch that a lane is in when a step begins, and how much of its run is behind it."""
        epoch = (step * self.global_batch_size + lane * self.width) // self.count
        return epoch, step * self.width - self.before(lane, epoch * self.count)


def lanes_of(global_batch_size: int, shards: int, at_most: int) -> int:
    """The largest divisor of the global batch that is neither above the shards nor `at_most`."""
    return max(
        n
        for n in range(1, min(global_batch_size, shards, at_most) + 1)
        if global_batch_size % n == 0
    )
