"""The order of training examples, which depends only on the seed, the epoch and the position.

Position p of the endless stream of examples is in epoch p // count; step k takes the positions
from k x global_batch_size on. Each epoch is a permutation of all examples, so an epoch reads every
example exactly once, and a run that resumes at step k sees the examples it would have seen.

With random access (arrays, files of images) the permutation is a Feistel network over all examples
(`permute_places`). For records in files it is built so that a position can be reached without
reading everything before it:

1. The shards are shuffled in each epoch and put one after another: a row of all examples.
2. The row is cut into `Tracks`. Place j of every global batch is filled from track j // (G / T),
   for global batch size G and T tracks. A host, which has consecutive places of each batch, reads
   few tracks, each in order from some record on. The number of hosts does not change the order.
3. Each track is shuffled in windows, each by a Feistel network.

To start at a step, whole shards are skipped by their counts, the index of a shard gives the byte
to start from, and at most one window of records is read and dropped.
"""

import dataclasses

import tensorflow as tf

from tftpu.input_pipelines.tensors import Tensor, skip_autograph

_ROUNDS = 8


@skip_autograph
def permute_places(places: Tensor, count: Tensor | int, key: Tensor) -> Tensor:
    """Returns the values (n,), int64, of a permutation at places, without computing all of it.

    Args:
        places: (n,), int64, each below `count`.
        count: (), int64, at least 1.
        key: (3,) or (n, 3), int32; selects the permutation.
    """
    # The op is a Feistel network. Its wrapper in tf.random takes only one seed for all places.
    return tf.raw_ops.RandomIndexShuffle(
        index=places, seed=key, max_index=tf.cast(count, tf.int64) - 1, rounds=_ROUNDS
    )


@skip_autograph
def derive_seeds(*words: Tensor) -> Tensor:
    """Hashes integers, each (n,), int64, to random numbers (n, 2), int32."""
    stacked = tf.stack(words, axis=1)
    hashed = tf.fingerprint(tf.reshape(tf.bitcast(stacked, tf.uint8), (tf.shape(stacked)[0], -1)))
    return tf.bitcast(tf.reshape(hashed, (-1, 2, 4)), tf.int32)


@dataclasses.dataclass(frozen=True)
class Tracks:
    """A division of an epoch's examples into tracks, each filling the same places of each batch.

    The methods' tensors are int64, scalars or vectors.

    Args:
        count: the number of examples in an epoch.
        global_batch_size: the number of examples per step.
        number: the number of tracks, a divisor of the global batch size.
    """

    count: int
    global_batch_size: int
    number: int

    @property
    def width(self) -> int:
        """The number of consecutive places of a batch that one track fills."""
        return self.global_batch_size // self.number

    def count_before(self, track: Tensor, position: Tensor) -> Tensor:
        """Returns how many of the stream's positions below `position` a track fills."""
        whole, rest = position // self.global_batch_size, position % self.global_batch_size
        return whole * self.width + tf.clip_by_value(rest - track * self.width, 0, self.width)

    def compute_borders(self, epoch: Tensor) -> Tensor:
        """Returns tracks' borders in an epoch's order: track t has [borders[t], borders[t + 1]).

        Returns:
            (number + 1,), int64.
        """
        track: Tensor = tf.range(self.number, dtype=tf.int64)
        end = self.count_before(track, (epoch + 1) * self.count)
        return tf.concat([[0], tf.cumsum(end - self.count_before(track, epoch * self.count))], 0)

    def locate_step(self, track: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a track's epoch at a step, and how many examples of that epoch it has read."""
        epoch = (step * self.global_batch_size + track * self.width) // self.count
        return epoch, step * self.width - self.count_before(track, epoch * self.count)


def choose_track_count(global_batch_size: int, shards: int, at_most: int) -> int:
    """Returns the largest divisor of the batch size that is at most `shards` and `at_most`."""
    return max(
        n
        for n in range(1, min(global_batch_size, shards, at_most) + 1)
        if global_batch_size % n == 0
    )
