"""TensorBoard profiles of a window of steps."""

import logging

import tensorflow as tf

from tftpu.config import profile_window


class Profiler:
    """Profiles the steps from the first up to the last of a window.

    Args:
        logdir: where TensorBoard looks for it.
        window: "100:110", or "" for none.
    """

    def __init__(self, logdir: str | None, window: str):
        self._logdir = logdir
        self.window = profile_window(window) if logdir else None
        self.running = False

    def boundaries(self) -> tuple[int, ...]:
        """The steps at which the device loop has to stop."""
        return self.window or ()

    def at(self, step: int) -> None:
        """Starts or ends the profile if the step is a boundary of its window."""
        if self.window is None:
            return
        first, last = self.window
        if not self.running and first <= step < last:
            try:
                tf.profiler.experimental.start(self._logdir)
                self.running = True
            except tf.errors.AlreadyExistsError:
                logging.warning(
                    "Another profile is being taken: steps %s:%s are not.", *self.window
                )
                self.window = None
        elif self.running and step >= last:
            self.stop()

    def stop(self) -> None:
        """Ends a running profile and writes it."""
        if self.running:
            tf.profiler.experimental.stop()
            self.running = False
