"""Generates the texts of several requests together."""

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from tftpu.inference.server.batching import Busy

if TYPE_CHECKING:
    from tftpu.inference.batch import Batch
    from tftpu.inference.programs import PromptSize, Size
    from tftpu.inference.rows import Row
    from tftpu.inference.writer import Writer

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.1  # seconds between two checks whether all requests are answered
Chunk = list[int] | Exception | None  # None: the text has ended


class Stopped(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """The server ends before the text has ended."""


@dataclasses.dataclass(frozen=True)
class Language:
    """A language model that answers with text.

    Attributes:
        writer: the writer of its tokens.
        encode: a function that returns the tokens of a text.
        decoder: a function that returns, for a prompt, a function from the next tokens to their
            characters.
        vocabulary: the number of tokens.
        context: the most tokens of a text that the model reads.
        device: "CPU" or "GPU".
    """

    writer: "Writer"
    encode: Callable[[str], list[int]]
    decoder: Callable[[Sequence[int]], Callable[[Sequence[int]], str]]
    vocabulary: int
    context: int
    device: str = "CPU"

    def list_further_sizes(self, most: int) -> "list[Size | PromptSize]":
        """Returns the usual sizes, for up to `most` texts, whose programs are not compiled yet."""
        programs = self.writer.programs
        sizes = programs.list_usual_sizes(most, tokens=self.vocabulary)
        return [size for size in sizes if not programs.has_compiled(size)]


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
    """Generates the texts of several requests together, in its own thread.

    A text joins the others between two calls of the device, as soon as fewer than `most` are
    written. Texts whose sampling sorts the whole vocabulary for each token would slow the others,
    so they have a separate batch; the two batches take turns.

    Args:
        language: the model.
        most: the most texts that are written at once.
        room: the most texts that may wait.
        observe: a function that is called with the number of texts in each turn.

    Attributes:
        compiling: whether texts wait while a program of their size is compiled.
    """

    def __init__(self, language: Language, most: int, room: int, observe: Callable[[int], None]):
        self._language, self._most, self._room, self._observe = language, most, room, observe
        self._queue: deque[_Text] = deque()
        self._running: list[_Text] = []
        self._batches: dict[bool, Batch] = {}  # True: the batch that sorts the whole vocabulary
        self.compiling = False
        self._came = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "writer")
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "compiler")

    @property
    def waiting(self) -> int:
        """The number of texts that wait and are still wanted."""
        return sum(text.asked.wanted for text in self._queue)

    def submit(self, rows: "Sequence[Row]") -> list[AsyncGenerator[list[int]]]:
        """Requests texts; returns, for each, an iterator over lists of its next tokens.

        Closing an iterator that has begun but not ended ends all texts of the request.

        Raises:
            Busy: too many texts wait.
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
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._came.wait()
                self._end_unwanted()
                self._admit()
                if self._running:
                    self._observe(len(self._running))
                    await loop.run_in_executor(self._thread, self._advance, loop)
                elif not self._queue:
                    self._came.clear()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def compile_ahead(
        self, sizes: "Sequence[Size | PromptSize]", report: Callable[[int, float], None]
    ) -> None:
        """Compiles programs while no request runs, so that requests of their sizes need not wait.

        Args:
            sizes: the sizes of the programs.
            report: a function that is called once all are compiled, with their number and the
                seconds that this took; not called if there are no sizes or compiling fails.
        """
        if not sizes:
            return
        start, loop = time.monotonic(), asyncio.get_running_loop()
        compile_size = self._language.writer.programs.compile
        try:
            for size in sizes:
                while self._running or self._queue:
                    await asyncio.sleep(_PAUSE_S)
                await loop.run_in_executor(self._compiler, compile_size, size)
        except Exception as error:  # a request then compiles its program, or reports why not
            _LOG.warning("Compiling ahead ended: %s: %s", type(error).__name__, error)
        else:
            report(len(sizes), time.monotonic() - start)
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Ends all texts at their present length; their iterators then raise `Stopped`."""
        for text in (*self._running, *self._queue):
            text.asked.wanted = False
            text.chunks.put_nowait(Stopped("the server stops"))

    def _end_unwanted(self) -> None:
        """Ends the texts whose clients have left."""
        for text in self._running:
            if not text.asked.wanted:
                self._batches[text.row.sampling.has_full_sort].remove(text)
        self._running = [text for text in self._running if text.asked.wanted]
        self._queue = deque(text for text in self._queue if text.asked.wanted)

    def _admit(self) -> None:
        """Moves waiting texts into the batches, first come first served, while there is room."""
        while self._queue and len(self._running) < self._most:
            text = self._queue.popleft()
            self._running.append(text)
            kind = text.row.sampling.has_full_sort
            if kind not in self._batches:
                vocabulary = self._language.vocabulary
                self._batches[kind] = self._language.writer.open_batch(
                    vocabulary, self._report_compiling
                )
            self._batches[kind].add(text, text.row)

    def _report_compiling(self, texts: str) -> None:
        self.compiling = True
        _LOG.warning("Texts wait while a program is compiled for %s.", texts)

    def _advance(self, loop: asyncio.AbstractEventLoop) -> None:
        """Advances each batch for a short time; removes ended texts from `_running`."""

        def put(text: _Text, chunk: Chunk) -> None:
            loop.call_soon_threadsafe(text.chunks.put_nowait, chunk)

        ended: set[_Text] = set()
        for kind, batch in list(self._batches.items()):
            try:
                for parts in batch.advance() if len(batch) else ():
                    for text, tokens, has_ended, failure in parts:
                        put(text, tokens)
                        if has_ended:
                            put(text, failure)
                            ended.add(text)
            except Exception as error:
                del self._batches[kind]
                failed = [t for t in self._running if t.row.sampling.has_full_sort == kind]
                for text in set(failed) - ended:
                    put(text, error)
                ended.update(failed)
        self.compiling = False
        self._running = [text for text in self._running if text not in ended]


async def _iterate_chunks(text: _Text) -> AsyncGenerator[list[int]]:
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
