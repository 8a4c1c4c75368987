"""Ends a run that hangs, after printing the last step and the stacks of all threads."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator

from tftpu.errors import ExitCode
from tftpu.runtime import leaving

# Extra seconds after which a C thread ends the process, with exit code 1, if Python cannot run.
_GIL_SECONDS = 30.0


class Watchdog:
    """A context manager that ends the process when no step finishes for some time.

    It starts at the first `beat`, so that the first step may compile for any time; later
    compilations must run in `paused`.

    Args:
        seconds: the time without a `beat` after which the process ends; must exceed the time
            of an evaluation and of a checkpoint. None: the process is never ended.
    """

    def __init__(self, seconds: float | None):
        # Without a stderr to write the stacks to, there is no watchdog.
        self._stderr = sys.__stderr__
        self._seconds = seconds if self._stderr is not None else None
        self._thread: threading.Thread | None = None
        self._last: float | None = None  # time.monotonic() of the last sign of life; None: paused
        self._step = 0
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self._last = None
        self._over.clear()
        if self._seconds is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join(timeout=5.0)
            self._thread = None

    def beat(self, step: int) -> None:
        """Records that the steps up to this one are done."""
        self._step, self._last = step, time.monotonic()
        if self._seconds is not None and self._stderr is not None:
            faulthandler.dump_traceback_later(
                self._seconds + _GIL_SECONDS, exit=True, file=self._stderr
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the watchdog in a `with` block, which may take any amount of time."""
        if self._last is None:
            yield
            return
        self._last = None
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()
        yield
        self.beat(self._step)

    def _watch(self, seconds: float) -> None:
        while not self._over.wait(min(seconds / 4, 5.0)):
            last = self._last
            if last is not None and time.monotonic() - last > seconds:
                self._end_process(seconds)

    def _end_process(self, seconds: float) -> None:
        print(
            f"tftpu: no step was finished for {seconds:.0f} s; the last one is step {self._step}. "
            "Stacks of all threads:",
            file=self._stderr,
            flush=True,
        )
        if self._stderr is not None:
            faulthandler.dump_traceback(self._stderr, all_threads=True)
        leaving.exit_at_once(ExitCode.HUNG)
