"""Profiles by TensorFlow's own profiler."""

from contextlib import AbstractContextManager

import tensorflow as tf


class TensorFlowTracer:
    """Records profiles with `tf.profiler.experimental`, which TensorBoard and xprof read."""

    def start(self, logdir: str) -> bool:
        """Starts a profile; returns False if another one is running in this process."""
        try:
            tf.profiler.experimental.start(logdir)
        except tf.errors.AlreadyExistsError:
            return False
        return True

    def stop(self) -> None:
        """Stops the running profile and writes it; raises OSError if it cannot be written."""
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:  # a full disk, a bucket out of reach
            raise OSError(error.message) from error

    def marker(self, step: int) -> AbstractContextManager[object]:
        """Returns a context manager that marks the device loop starting at a step."""
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def note(self, name: str, **numbers: int) -> None:
        """Writes an event that carries numbers into the running profile."""
        with tf.profiler.experimental.Trace(name, **numbers):
            pass
