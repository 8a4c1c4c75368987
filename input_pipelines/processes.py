"""A function of numbers, worked out by all cores."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator


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
    try:
        yield lambda function, numbers: list(pool.map(function, numbers))
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A process of the pool would wait for work for ever if its parent is killed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
