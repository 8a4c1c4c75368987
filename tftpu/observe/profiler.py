"""TensorBoard profiles: of windows of steps, when a signal asks for one, of what is slow."""

import collections
import contextlib
import logging
import signal
import statistics
import threading
from collections.abc import Iterator

import tensorflow as tf

from tftpu.config import profile_plan

INPUT_WAIT = "tftpu_input_wait"  # the event that says what a step waited
LENGTH = 10  # steps of a profile that no window was given for
SLOW_AT_MOST = 5  # profiles of slow loops in a run
_LOOPS = 100  # device loops before one can be told to be among the slowest 1 %


class Profiler:
    """Profiles steps. While one runs, every step is a device loop of its own, with a marker.

    Args:
        logdir: where TensorBoard looks for it; None: nothing is profiled.
        plan: windows of steps and "slow", as `tftpu.config.profile_plan` reads them.
    """

    def __init__(self, logdir: str | None, plan: str):
        windows, self._slow = profile_plan(plan)
        self._logdir = logdir
        self._windows = list(windows) if logdir else []
        self._last = 0  # the step that the running profile ends before
        self._asked = ""  # why one is to be taken as soon as can be
        self._loops: collections.deque[float] = collections.deque(maxlen=1000)
        self._slow_taken = 0
        self.running = False

    def boundaries(self, step: int) -> tuple[int, ...]:
        """The steps at which the device loop has to stop, seen from the one it is at."""
        steps = [s for window in self._windows for s in window]
        return (*steps, step + 1) if self.running else tuple(steps)

    def at(self, step: int) -> None:
        """Starts or ends a profile, if one is due at the step."""
        if self.running and step >= self._last:
            self.stop()
        if self.running or not self._logdir:
            return
        due = [last for first, last in self._windows if first <= step < last]
        if self._asked:
            logging.warning("Profiling the next %d steps: %s.", LENGTH, self._asked)
            due.append(step + LENGTH)
        self._asked = ""
        if due:
            self._start(max(due))

    def stop(self) -> None:
        """Ends a running profile and writes it, if that can be: a run does not end for it."""
        if self.running:
            self.running = False
            try:
                tf.profiler.experimental.stop()
            except tf.errors.OpError as error:  # a full disk, a bucket that is away
                logging.warning("The profile could not be written: %s", error.message)

    def marker(self, step: int) -> contextlib.AbstractContextManager:
        """Marks the device loop from this step on in the profile, if one runs."""
        if not self.running:
            return contextlib.nullcontext()
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def note_wait(self, seconds: float) -> None:
        """Writes into a running profile what the last device loop waited for its input.

        The trace itself shows the threads of the input pipeline, not who waits for them.
        """
        if self.running:
            with tf.profiler.experimental.Trace(INPUT_WAIT, microseconds=round(1e6 * seconds)):
                pass

    def observe(self, seconds: float) -> None:
        """Looks at how long a step of the last device loop took."""
        if not self._slow or self._slow_taken >= SLOW_AT_MOST:
            return
        if len(self._loops) >= _LOOPS:
            slowest = sorted(self._loops)[-len(self._loops) // 100 :][0]
            median = statistics.median(self._loops)
            if seconds > max(slowest, 1.5 * median):
                self._slow_taken += 1
                self._asked = f"one took {1e3 * seconds:.1f} ms, the median {1e3 * median:.1f} ms"
        self._loops.append(seconds)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block SIGUSR1 asks for a profile. Signals reach the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(*_) -> None:
            self._asked = "SIGUSR1 asks for it"

        previous = signal.signal(signal.SIGUSR1, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, previous)

    def _start(self, last: int) -> None:
        try:
            tf.profiler.experimental.start(self._logdir)
        except tf.errors.AlreadyExistsError:
            logging.warning("Another profile is being taken: the steps up to %d are not.", last)
            self._windows = [window for window in self._windows if window[1] > last]
            return
        self.running, self._last = True, last
