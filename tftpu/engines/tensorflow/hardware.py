"""Hardware of a `tf.distribute` strategy."""

import tensorflow as tf

from tftpu.tpu.hardware import Hardware, of_devices


def of(strategy: tf.distribute.Strategy) -> Hardware:
    """Returns the hardware that a strategy runs on."""
    is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    return of_devices(strategy.num_replicas_in_sync, is_tpu)
