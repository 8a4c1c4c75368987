"""Batching of requests: those that arrive while the model computes form the next batch."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tftpu.inference.server.served import Arrays, Call


class Busy(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """Too many requests wait already."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    arrays: Arrays
    count: int
    found: asyncio.Future[Arrays]


class Batcher:
    """Computes the examples of several requests together.

    No request is held back to fill a batch. The requests that came while the model was busy are the
    next batch, so batches grow with the load.

    Args:
        call: a function that maps inputs by name to outputs by name. It runs in its own thread.
        most: the most examples in a batch.
        room: the most examples that may wait.
        observe: a function that is called with the number of examples of each batch.
    """

    def __init__(self, call: Call, most: int, room: int, observe: Callable[[int], None]):
        self._call, self._most, self._room, self._observe = call, most, room, observe
        self._queue: deque[_Waiting] = deque()
        self._came = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "model")

    @property
    def waiting(self) -> int:
        """The number of examples that wait and are still wanted."""
        return sum(item.count for item in self._queue if not item.found.done())

    async def compute_outputs(self, arrays: Arrays, count: int) -> Arrays:
        """Returns the outputs by name for a request's examples.

        Raises:
            Busy: too many examples wait.
            Refused: the model does not take the values.
        """
        if self.waiting + count > max(self._room, count):
            raise Busy
        item = _Waiting(arrays, count, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._came.set()
        try:
            return await item.found
        except asyncio.CancelledError:  # the client does not wait any more
            with contextlib.suppress(ValueError):
                self._queue.remove(item)
            raise

    async def run(self) -> None:
        """Computes requests until it is cancelled."""
        try:
            while True:
                await self._came.wait()
                await self._compute(self._pop_next())
                if not self._queue:
                    self._came.clear()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _pop_next(self) -> list[_Waiting]:
        """Takes the next requests whose examples fit into a batch, or one larger request."""
        taken: list[_Waiting] = []
        count = 0
        while self._queue and (not taken or count + self._queue[0].count <= self._most):
            item = self._queue.popleft()
            if not item.found.done():  # a request that timed out is not computed
                taken.append(item)
                count += item.count
        return taken

    async def _compute(self, items: Sequence[_Waiting]) -> None:
        try:
            parts = _split_outputs(await self._join_items(items), [item.count for item in items])
        except Exception as error:
            if len(items) == 1 and not items[0].found.done():
                items[0].found.set_exception(error)
        else:
            for item, part in zip(items, parts):
                if not item.found.done():
                    item.found.set_result(part)
            return
        # Computes each request alone to find the one that failed, so that the others get their
        # answers.
        for item in items if len(items) > 1 else ():
            await self._compute([item])

    async def _join_items(self, items: Sequence[_Waiting]) -> Arrays:
        if not items:
            return {}
        count = sum(item.count for item in items)
        joined = {
            name: np.concatenate([item.arrays[name] for item in items])
            if len(items) > 1
            else items[0].arrays[name]
            for name in items[0].arrays
        }
        parts = []
        for first in range(0, count, self._most):
            if all(item.found.done() for item in items):  # all clients have left
                return {}
            batch = {name: value[first : first + self._most] for name, value in joined.items()}
            self._observe(min(self._most, count - first))
            loop = asyncio.get_running_loop()
            parts.append(await loop.run_in_executor(self._thread, self._call, batch))
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _split_outputs(found: Arrays, counts: Sequence[int]) -> list[Arrays]:
    """Returns the outputs of each request."""
    wrong = [name for name, value in found.items() if value.shape[:1] != (sum(counts),)]
    if wrong:
        raise ValueError(f"The output {wrong[0]!r} does not have one value for each example.")
    ends = np.cumsum(counts)
    return [
        {name: value[end - count : end] for name, value in found.items()}
        for end, count in zip(ends, counts)
    ]
