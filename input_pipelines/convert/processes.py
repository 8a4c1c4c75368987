"""A function of numbers, worked out by all cores."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def each(workers: int, tasks: int) -> Iterator[Callable]:
    """A map, `each(function, numbers)`: the results in order; the first error, at once.

    Args:
        workers: processes at most.
        tasks: about how many numbers there will be; with one, nothing is started.
    """
    if min(workers, tasks) <= 1:
        yield lambda function, numbers: [function(number) for number in numbers]
        return
    # Not by fork: TensorFlow's threads would not be there.
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, initializer=_end_with_parent)

    def run(function: Callable, numbers: Iterable[int]) -> list:
        with _without_main():
            results = pool.map(function, numbers)
        return list(results)

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """New processes would run the user's script once more; nothing here needs it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    """A process of the pool would wait for work for ever if its parent is killed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
