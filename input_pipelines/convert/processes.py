"""A parallel map over numbers, in several processes."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tftpu import fork_server

Map = Callable[[Callable[[int], Any], Iterable[int]], list[Any]]


@contextlib.contextmanager
def parallel_map(workers: int, tasks: int) -> Iterator[Map]:
    """Yields a function `each(function, numbers)`: an ordered map that ends at the first error.

    Args:
        workers: the maximum number of processes.
        tasks: the approximate length of `numbers`. If it or `workers` is 1, no process is started.
    """
    if min(workers, tasks) <= 1:
        yield lambda function, numbers: [function(number) for number in numbers]
        return
    context = fork_server.start([__name__])
    # Waits until the server has imported its modules: interrupted before that, it would still start
    # the pool's processes, which would fail because the pool's locks no longer exist.
    first = context.Process(target=int)
    with _hide_main():
        first.start()
    first.join()
    ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a script's background job
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, context, initializer=_prepare_process, initargs=(ignores,)
    )

    def run(function: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
        with _hide_main():
            results = pool.map(function, numbers)
        return list(results)

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _hide_main() -> Iterator[None]:
    """Hides the user's script, which new processes would otherwise run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _prepare_process(ignores: bool) -> None:
    """Makes a pool process end when its parent ends or is killed, and end silently at Ctrl-C.

    Args:
        ignores: whether the parent ignores Ctrl-C; if so, this process ignores it, too.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not ignores:
        signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # the parent reports the interrupt
    parent = multiprocessing.parent_process()
    if not parent:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
