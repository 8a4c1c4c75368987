"""Profiles planned windows of steps, steps after a signal, and unusually slow steps."""

import collections
import contextlib
import logging
import signal
import statistics
import sys
import threading
from collections.abc import Iterator

from tftpu.config import profile_plan
from tftpu.engines.engine import Tracer

# The trace event for the time that a device loop waited for its input.
INPUT_WAIT = "tftpu_input_wait"
LENGTH = 10  # number of steps in a profile without a planned window
SLOW_AT_MOST = 5  # most profiles of slow loops in a run
_LOOPS = 100  # device loops after which the slowest 1 % can be determined

_log = logging.getLogger(__name__)


class Profiler:
    """A profiler of steps. While it records, every step is its own device loop, with a marker.

    Args:
        logdir: the folder that TensorBoard reads; None: nothing is profiled.
        plan: windows of steps and "slow", as `tftpu.config.profile_plan` reads them.
        tracer: the engine's tracer.

    Attributes:
        running: whether a profile is being recorded.
    """

    def __init__(self, logdir: str | None, plan: str, tracer: Tracer):
        windows, self._slow = profile_plan(plan)
        self._logdir = logdir
        self._tracer = tracer
        self._windows = list(windows) if logdir else []
        self._last = 0  # the step at which the running profile ends
        self._asked = ""  # the reason why the next profile is due; "" if none is
        self._loops: collections.deque[float] = collections.deque(maxlen=1000)
        self._slow_taken = 0
        self.running = False

    def list_boundaries(self, step: int) -> tuple[int, ...]:
        """Returns the steps at which a device loop that starts at `step` has to stop."""
        steps = [s for window in self._windows for s in window]
        return (*steps, step + 1) if self.running else tuple(steps)

    def start_or_stop(self, step: int) -> None:
        """Starts or stops a profile, if one is due at the step."""
        if self.running and step >= self._last:
            self.stop()
        if self.running or not self._logdir:
            return
        due = [last for first, last in self._windows if first <= step < last]
        if self._asked:
            text = f"tftpu: profiling the next {LENGTH} steps: {self._asked}."
            print(text, file=sys.stderr, flush=True)
            due.append(step + LENGTH)
        self._asked = ""
        if due:
            self._start(self._logdir, max(due))

    def stop(self) -> None:
        """Stops a running profile and writes it; a failure is only logged."""
        if self.running:
            self.running = False
            try:
                self._tracer.stop()
            except OSError as error:
                _log.warning("The profile could not be written: %s", error)

    def marker(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context manager that marks the device loop at a step in a running profile."""
        return self._tracer.marker(step) if self.running else contextlib.nullcontext()

    def note_wait(self, seconds: float) -> None:
        """Writes into a running profile how long the last device loop waited for its input.

        The trace itself shows the threads of the input pipeline, not what waits for them.
        """
        if self.running:
            self._tracer.note(INPUT_WAIT, microseconds=round(1e6 * seconds))

    def observe(self, seconds: float) -> None:
        """Records the mean seconds of a step in the last device loop, to detect slow ones."""
        if not self._slow or self._slow_taken >= SLOW_AT_MOST:
            return
        if len(self._loops) >= _LOOPS:
            slowest = sorted(self._loops)[-len(self._loops) // 100 :][0]
            median = statistics.median(self._loops)
            if seconds > max(slowest, 1.5 * median):
                self._slow_taken += 1
                self._asked = f"a step took {1e3 * seconds:.1f} ms, median {1e3 * median:.1f} ms"
        self._loops.append(seconds)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes a profile on SIGUSR1 within the block, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(*_: object) -> None:
            self._asked = "requested by SIGUSR1"

        previous = signal.signal(signal.SIGUSR1, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, previous)

    def _start(self, logdir: str, last: int) -> None:
        if not self._tracer.start(logdir):
            _log.warning(
                "Another profile is running, so the steps up to %d are not profiled.", last
            )
            self._windows = [window for window in self._windows if window[1] > last]
            return
        self.running, self._last = True, last
