"""Reports on a block of code that takes long."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


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
