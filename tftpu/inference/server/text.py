"""Writes the texts of several requests together."""

import asyncio
import concurrent.futures
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from tftpu.inference.server.batching import Busy

if TYPE_CHECKING:
    from tftpu.inference.writer import Row, Writer

_LOG = logging.getLogger(__name__)
Chunk = list[int] | Exception | None  # None: the text has ended


class Stopped(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """The server ends before the text has ended."""


@dataclasses.dataclass(frozen=True)
class Language:
    """A language model that answers with text.

    Attributes:
        writer: the writer of its tokens.
        encode: a function that returns the tokens of a text.
        decoder: returns, for a prompt, a function that maps the next tokens to their characters.
        vocabulary: the number of tokens.
        device: "CPU" or "GPU".
    """

    writer: "Writer"
    encode: Callable[[str], list[int]]
    decoder: Callable[[Sequence[int]], Callable[[Sequence[int]], str]]
    vocabulary: int
    device: str = "CPU"


@dataclasses.dataclass(eq=False)
class _Asked:
    """A request for texts, which may no longer be wanted."""

    wanted: bool = True


@dataclasses.dataclass(eq=False)
class _Text:
    row: "Row"
    chunks: asyncio.Queue[Chunk]
    asked: _Asked


class Texts:
    """Writes the texts of several requests together, in its own thread.

    Texts whose tokens are chosen in the same way begin together. Later texts wait until these end.

    Args:
        writer: the writer of the model.
        most: the most texts that are written at once.
        room: the most texts that may wait.
        observe: a function that is called with the number of texts in each batch.

    Attributes:
        compiling: whether the texts that are written wait for a program of their size.
    """

    def __init__(self, writer: "Writer", most: int, room: int, observe: Callable[[int], None]):
        self._writer, self._most, self._room, self._observe = writer, most, room, observe
        self._queue: deque[_Text] = deque()
        self._running: list[_Text] = []
        self.compiling = False
        self._came = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "writer")

    @property
    def waiting(self) -> int:
        """The number of texts that wait and are still wanted."""
        return sum(text.asked.wanted for text in self._queue)

    def submit(self, rows: "Sequence[Row]") -> list[AsyncIterator[list[int]]]:
        """Requests texts; returns an iterator over the parts of each text.

        Raises:
            Busy: too many wait.
        """
        if self.waiting + len(rows) > max(self._room, len(rows)):
            raise Busy
        asked = _Asked()
        texts = [_Text(row, asyncio.Queue(), asked) for row in rows]
        self._queue.extend(texts)
        self._came.set()
        return [_iterate_chunks(text) for text in texts]

    async def run(self) -> None:
        """Writes the requested texts until it is cancelled."""
        try:
            while True:
                await self._came.wait()
                texts = self._pop_next()
                loop = asyncio.get_running_loop()
                if texts:
                    self._running = texts
                    self._observe(len(texts))
                    await loop.run_in_executor(self._thread, self._write, texts, loop)
                if not self._queue:
                    self._came.clear()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Ends all texts at their present length."""
        for text in (*self._running, *self._queue):
            text.asked.wanted = False
            text.chunks.put_nowait(Stopped("the server stops"))

    def _pop_next(self) -> list[_Text]:
        """Takes the longest waiting text, and others that choose tokens in the same way."""
        wanted = [text for text in self._queue if text.asked.wanted]
        choice = wanted[0].row.sampling.choice if wanted else None
        taken = [text for text in wanted if text.row.sampling.choice == choice][: self._most]
        self._queue = deque(text for text in wanted if text not in taken)
        return taken

    def _write(self, texts: Sequence[_Text], loop: asyncio.AbstractEventLoop) -> None:
        def put(text: _Text, chunk: Chunk) -> None:
            loop.call_soon_threadsafe(text.chunks.put_nowait, chunk)

        running = dict(enumerate(texts))
        rows = [text.row for text in texts]
        # The number of rows is rounded up, so that few sizes are compiled. A filling row is one
        # token.
        filling = rows[0]._replace(prompt=[0], length=1)
        rows += [filling] * ((1 << (len(rows) - 1).bit_length()) - len(rows))

        def report_compiling() -> None:
            self.compiling = True
            _LOG.warning("Compiling for %s at once; answers wait.", _count_texts(len(rows)))

        try:
            for tokens, ended in self._writer.iterate_chunks(
                rows, before_compiling=report_compiling
            ):
                self.compiling = False
                for index, text in list(running.items()):
                    put(text, tokens[index])
                    if ended[index]:  # a text that has ended is answered before longer ones end
                        put(running.pop(index), None)
                if not any(text.asked.wanted for text in running.values()):
                    break
        except Exception as error:
            for text in running.values():
                put(text, error)
        self.compiling = False
        for text in running.values():
            put(text, None)


def _count_texts(count: int) -> str:
    return "1 text" if count == 1 else f"up to {count} texts"


async def _iterate_chunks(text: _Text) -> AsyncIterator[list[int]]:
    """Yields the chunks of a text. If the reader stops, all texts of its request end."""
    try:
        while True:
            part = await text.chunks.get()
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            if part:
                yield part
    except BaseException:
        text.asked.wanted = False
        raise
