"""Writes the texts of several requests together."""

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from tftpu.inference.server.batching import Busy

if TYPE_CHECKING:
    from tftpu.inference.writer import Row, Size, Writer

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.1  # seconds between looks at whether requests are answered
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

    def list_further_sizes(self, most: int) -> "list[Size]":
        """Returns the usual sizes of up to `most` texts, but the smallest."""
        return self.writer.list_usual_sizes(most, tokens=self.vocabulary)[1:]


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

    Texts that wait begin together; those that need the whole vocabulary sorted for each token, only
    with others of their kind. Later texts wait until these end.

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
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "compiler")

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
                    self._running = []
                if not self._queue:
                    self._came.clear()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def compile_ahead(
        self, sizes: "Sequence[Size]", report: Callable[[int, float], None]
    ) -> None:
        """Compiles programs, so that requests of their sizes need not wait; begins none during one.

        Args:
            sizes: the sizes of the programs.
            report: a function that is called with the number of programs and the seconds since the
                call, once all are compiled.
        """
        start, loop = time.monotonic(), asyncio.get_running_loop()
        try:
            for size in sizes:
                while self._running or self._queue:
                    await asyncio.sleep(_PAUSE_S)
                await loop.run_in_executor(self._compiler, self._writer.compile, size)
        except Exception as error:  # requests compile their programs themselves, or say why not
            _LOG.warning("Compiling ahead ended: %s: %s", type(error).__name__, error)
        else:
            report(len(sizes), time.monotonic() - start)
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Ends all texts at their present length."""
        for text in (*self._running, *self._queue):
            text.asked.wanted = False
            text.chunks.put_nowait(Stopped("the server stops"))

    def _pop_next(self) -> list[_Text]:
        """Takes the longest waiting text, and others that can be written with it."""
        wanted = [text for text in self._queue if text.asked.wanted]
        taken = [
            text
            for text in wanted
            if text.row.sampling.has_full_sort == wanted[0].row.sampling.has_full_sort
        ][: self._most]
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

        def report_compiling(size: "Size") -> None:
            self.compiling = True
            _LOG.warning("Compiling for %s: the first of this size waits.", _describe_size(size))

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


def _describe_size(size: "Size") -> str:
    texts = "1 text" if size.rows == 1 else f"up to {size.rows} texts at once"
    if not size.room:
        return f"{texts} of up to {size.prompt} tokens with their prompts"
    return f"{texts}, prompts of up to {size.prompt} tokens, and up to {size.room} more"


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
