"""Switches tf.data's tuning of parallelism off where it cannot improve anything."""

import os

import tensorflow as tf

# Up to this number of cores, tf.data begins with as many parallel calls as there are cores
# (TensorFlow 2.19 to 2.21), which is the most that its tuning may choose.
_CORES = 16


def limit_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set without tuning on a machine of few cores, unless its options set it.

    The deletion of an iterator joins the thread that tunes it. This thread sleeps about as long as
    the iterator has lived, at most a minute, and often misses the call that ends its sleep:
    TensorFlow wakes the thread before setting the flag that the thread checks. A run would end, and
    an evaluation return, up to a minute late.
    """
    if (os.cpu_count() or 1) > _CORES or dataset.options().autotune.enabled is not None:
        return dataset
    return switch_tuning_off(dataset)


def switch_tuning_off(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set without tuning; see `limit_tuning`."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
