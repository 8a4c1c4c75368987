"""A run that hangs: the stacks of all threads, the last good step, and the end of the process."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

HUNG = 124  # the exit code, as that of timeout(1)
_GIL_SECONDS = 30.0  # more, where Python cannot run and C has to end the process, with 1


class Watchdog:
    """A context that ends the process when no step is finished for some time.

    It starts to count at the first `beat`, so that the first step may compile as long as it needs
    to; what compiles later is run within `paused`.

    Args:
        seconds: without a beat; more than an evaluation and a checkpoint take. None: never.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._last: float | None = None  # monotonic; None: not counting
        self._step = 0
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self._last = None
        self._over.clear()
        if self._seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join()

    def beat(self, step: int) -> None:
        """A step is done."""
        self._step, self._last = step, time.monotonic()
        if self._seconds is not None:
            faulthandler.dump_traceback_later(
                self._seconds + _GIL_SECONDS, exit=True, file=sys.__stderr__
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that may take as long as it likes."""
        if self._last is None:
            yield
            return
        self._last = None
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()
        yield
        self.beat(self._step)

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / 4, 5.0)):
            last = self._last
            if last is not None and time.monotonic() - last > self._seconds:
                self._bark()

    def _bark(self) -> None:
        print(
            f"tftpu: No step was finished for {self._seconds:.0f} s; the last good one is step "
            f"{self._step}. Where every thread is:",
            file=sys.__stderr__,
            flush=True,
        )
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        os._exit(HUNG)
