"""Reports on a block of code that takes long."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_SLOW = 2.0  # seconds from which waiting is worth a line
_FIRST, _LONGEST = 5.0, 60.0  # seconds to the first line, and the most between two lines


@contextlib.contextmanager
def reporting_after(seconds: float, report: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Calls `report(*arguments)` in a thread if the `with` block takes longer than `seconds`."""
    timer = threading.Timer(seconds, report, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def reporting_if_slow(doing: str) -> Iterator[None]:
    """Prints `doing` to stderr after 2 s of the `with` block; then acts as `counting_seconds`."""
    with reporting_after(_SLOW, report_activity, doing), counting_seconds(doing):
        yield


def report_activity(doing: str) -> None:
    """Prints to stderr what the program is doing; stdout is for its results."""
    print(f"{doing} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def counting_seconds(doing: str) -> Iterator[None]:
    """Prints the seconds of the `with` block so far, after 5, 10, 20, 40, 80, then each minute."""
    # A copy of the descriptor, because the `with` block may redirect standard error.
    descriptor = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else os.dup(2)
    ended = threading.Event()
    arguments = (doing, descriptor, ended)
    try:
        threading.Thread(target=_count_seconds, args=arguments, daemon=True).start()
        yield
    finally:
        ended.set()


def _count_seconds(doing: str, descriptor: int, ended: threading.Event) -> None:
    start, after = time.monotonic(), _FIRST
    with open(descriptor, "w") as shown:  # closes the descriptor
        while not ended.wait(start + after - time.monotonic()):
            with contextlib.suppress(OSError):  # standard error may be a closed pipe
                print(f"{doing}: {time.monotonic() - start:.0f} s so far", file=shown, flush=True)
            after += min(after, _LONGEST)
