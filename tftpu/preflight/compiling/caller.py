"""Examines slices in parallel threads, while one thread builds and lowers all models."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class StoppedError(Exception):
    """Raised in the threads of the other slices after one slice failed, or after Ctrl-C."""


class Caller:
    """A queue of functions, which run in the thread that created this object.

    Keras and TensorFlow keep settings such as the dtype policy per thread, and neither traces in
    two threads at once. All code that needs them therefore runs through this object.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = (
            queue.SimpleQueue()
        )

    def run(self, function: Callable[[], _T]) -> _T:
        """Runs a function in the thread that created this object, and returns its result.

        Other threads may call this only while that thread is in `map_items`.
        """
        if threading.get_ident() == self._thread:
            return function()
        answer: Future[_T] = Future()
        self._asked.put((function, answer))
        return answer.result()

    def map_items(
        self,
        function: Callable[[_Item], _T],
        items: Iterable[_Item],
        stop: Callable[[], None],
    ) -> list[_T]:
        """Runs a function on each item in a separate thread; returns the results in order.

        Args:
            function: examines one item; it may call `run`.
            items: one or more items.
            stop: function that is called once if a thread fails, or on Ctrl-C; it must end the work
                that the other threads wait for.

        Raises:
            Exception: the first exception of a thread; the other threads have ended by then.
        """
        given = list(items)
        pool = ThreadPoolExecutor(len(given), "preflight")
        waiting = [pool.submit(function, item) for item in given]
        for future in waiting:
            future.add_done_callback(lambda _: self._asked.put(None))
        try:
            while not all(future.done() for future in waiting):
                asked = self._asked.get()
                if asked is not None:
                    _answer(*asked)
                for future in waiting:
                    if future.done():
                        future.result()  # raises the thread's error, if there is one
            return [future.result() for future in waiting]
        except BaseException:
            stop()
            for future in waiting:
                future.cancel()
            while not all(future.done() for future in waiting):
                asked = self._asked.get()
                if asked is not None:
                    asked[1].set_exception(StoppedError())
            raise
        finally:
            pool.shutdown()


def _answer(function: Callable[[], Any], answer: Future) -> None:
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
    except BaseException:
        answer.set_exception(StoppedError())
        raise
