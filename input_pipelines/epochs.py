"""The order of training examples, as a function of the seed and the position alone.

Epoch after epoch the data set is shuffled with a seed made of the run's seed and the epoch, and
the epochs are joined end to end; step k takes the examples from k x global_batch on. So a run that
goes on from step k sees exactly what it would have seen: no example twice, none left out.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tftpu.errors import UserError


@dataclasses.dataclass
class Training:
    """An endless, shuffled, batched dataset that can start at any step.

    Args:
        base: one epoch of examples in a fixed order, as they are stored.
        count: examples in `base`.
        global_batch: examples a step.
        seed: of the order and of the augmentation.
        prepare: (a batch of examples, seeds (batch, 2), int32) -> a batch as the model takes it.
            The seeds are random numbers that depend on the run's seed, the epoch and the example
            alone. Whole batches at a time, because a function call an example costs more than
            what it does to a small one.
        shuffle_buffer: examples held in host memory; None: all of them.
    """

    base: tf.data.Dataset
    count: int
    global_batch: int
    seed: int
    prepare: Callable
    shuffle_buffer: int | None = None

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
        first_epoch, offset = divmod(step * self.global_batch, self.count)

        def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            # Within a dataset function this seeds the function's own graph alone. TensorFlow takes
            # an epoch that is a tensor only beside a graph seed that is not 0.
            tf.random.set_seed(self.seed + 1)
            shuffled = self.base.enumerate().shuffle(
                self.shuffle_buffer or self.count,
                seed=epoch,
                reshuffle_each_iteration=False,
            )
            # Skipped before anything is decoded.
            skip = tf.where(epoch == first_epoch, tf.constant(offset, tf.int64), 0)
            epochs = tf.data.Dataset.from_tensors(epoch).repeat()
            return tf.data.Dataset.zip(epochs, shuffled.skip(skip))

        def prepare(epoch, numbered):
            index, examples = numbered
            run = tf.fill((share,), tf.constant(self.seed, tf.int64))
            words = tf.bitcast(tf.stack([run, epoch, index], axis=1), tf.uint8)
            hashed = tf.fingerprint(tf.reshape(words, (share, -1)))  # (batch, 8), uint8
            return self.prepare(examples, tf.bitcast(tf.reshape(hashed, (share, 2, 4)), tf.int32))

        examples = tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(one_epoch)
        if hosts > 1:
            # What belongs to other hosts is passed over before it is prepared.
            examples = examples.enumerate().filter(
                lambda position, _: position % self.global_batch // share == host
            )
            examples = examples.map(lambda _, example: example)
        batches = examples.batch(share, drop_remainder=True)
        return batches.map(prepare, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
