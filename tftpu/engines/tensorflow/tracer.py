"""TensorFlow's profiler, as a `tftpu.engines.engine.Tracer`."""

import contextlib
from typing import Any

import tensorflow as tf


class TensorFlowTracer:
    """A tracer for TensorBoard that uses `tf.profiler`; see `tftpu.engines.engine.Tracer`."""

    def start(self, logdir: str) -> bool:
        """Starts a trace; returns False if another one is running in this process."""
        try:
            tf.profiler.experimental.start(logdir)
        except tf.errors.AlreadyExistsError:
            return False
        return True

    def stop(self) -> None:
        """Ends the trace and writes it. Raises `OSError` if it cannot be written."""
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise OSError(error.message) from error

    def marker(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that marks a step in the trace."""
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def note(self, name: str, **numbers: int) -> None:
        """Writes an event with a name and integer values into the trace."""
        with tf.profiler.experimental.Trace(name, **numbers):
            pass
