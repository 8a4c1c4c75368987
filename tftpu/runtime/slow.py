"""Reports on a block of code that takes long."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_FIRST, _LONGEST = 5.0, 60.0  # seconds from a report of a block to the next


@contextlib.contextmanager
def reporting_after(seconds: float, report: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Calls `report` with the arguments, in a thread, if the block takes longer than that."""
    timer = threading.Timer(seconds, report, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def reporting_again(report: Callable[[float], None]) -> Iterator[None]:
    """Calls `report`, in a thread, with the seconds that a block takes until then.

    After 5 seconds, 10, 20, 40, 80, and then each minute.
    """
    ended = threading.Event()

    def repeat() -> None:
        seconds, wait = 0.0, _FIRST
        while not ended.wait(wait):
            seconds += wait
            report(seconds)
            wait = min(seconds, _LONGEST)

    thread = threading.Thread(target=repeat, name="reporting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
