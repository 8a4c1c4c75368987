"""A gate before a data set: no batch is read before its epoch begins."""

import tensorflow as tf

_WAITING = 16  # epochs that are admitted and not yet begun to be read; there is one


class Gate:
    """Holds a data set back until its batches are admitted.

    tf.data reads ahead as far as it can, also into the next epoch, whose examples a callback may
    still change. Within what is admitted, it reads ahead as ever.
    """

    def __init__(self) -> None:
        with tf.device("CPU"):
            self._admitted = tf.queue.FIFOQueue(_WAITING, [tf.int64], shapes=[()])
        self._guards = False

    def admit(self, batches: int) -> None:
        """Lets through as many batches more, of the data set that it guards, if it does."""
        if self._guards:
            self._admitted.enqueue(tf.constant(batches, tf.int64))

    def close(self) -> None:
        """Ends the data set for those who wait for it: their threads could not be joined."""
        self._admitted.close()

    def guard(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns an endless data set, of which nothing is read that is not admitted."""

        self._guards = True

        def turns(count):
            return tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat(count)

        counts = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: self._admitted.dequeue())
        # It asks for a turn before it asks for a batch.
        guarded = tf.data.Dataset.choose_from_datasets([batches], counts.flat_map(turns))
        return endless(guarded)


def endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a data set as endless: on several devices, others lose their static shape."""
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
