"""A gate that lets no batch of a data set be read before its epoch begins."""

import tensorflow as tf

_WAITING = 16  # capacity of the queue of admitted epochs; at most one waits to be read


class Gate:
    """Holds a data set back until its batches are admitted.

    tf.data reads ahead as far as it can, even into the next epoch, whose examples a callback may
    still change. The gate limits it to the admitted batches.
    """

    def __init__(self) -> None:
        with tf.device("CPU"):
            self._admitted = tf.queue.FIFOQueue(_WAITING, [tf.int64], shapes=[()])
        self._guards = False

    def admit(self, batches: int) -> None:
        """Admits this number of further batches; has no effect before `guard` is called."""
        if self._guards:
            self._admitted.enqueue(tf.constant(batches, tf.int64))

    def close(self) -> None:
        """Ends the data set, so that threads that wait for its batches end and can be joined."""
        self._admitted.close()

    def guard(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns an endless data set whose batches are read only after they are admitted."""

        self._guards = True

        def turns(count):
            return tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat(count)

        counts = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: self._admitted.dequeue())
        # Before each batch, choose_from_datasets reads an item of `turns`, which waits for `admit`.
        guarded = tf.data.Dataset.choose_from_datasets([batches], counts.flat_map(turns))
        return endless(guarded)


def endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Declares a data set endless; otherwise tf.distribute yields batches without static size."""
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
