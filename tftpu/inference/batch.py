"""Continuous batching: texts join and leave a batch between two calls of the device."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from tftpu.errors import NotFiniteError
from tftpu.inference.loop import EVERY
from tftpu.inference.programs import Programs, Size
from tftpu.inference.rows import Row, Tokens
from tftpu.inference.sampling import Sampling, gather_rules
from tftpu.tensors import Nest, ops

_CALL_S = 0.1  # target duration of a call in seconds; no text can join during a call
_SHORT = 4  # tokens per call while prompts wait, so that they are read soon
_SPARE = 16  # calls in a row with unused room, after which the batch shrinks


class Part(NamedTuple):
    """The next tokens of a text.

    Attributes:
        key: the key of the text, as given to `Batch.add`.
        tokens: the next tokens.
        ended: whether the text has ended.
        error: the error that ended the text early; None: there was none.
    """

    key: Any
    tokens: Tokens
    ended: bool
    error: NotFiniteError | None = None


class Batch(Protocol):
    """Texts that are written together."""

    def __len__(self) -> int:
        """Returns the number of texts that have not ended."""
        ...

    def add(self, key: Any, row: Row) -> None:
        """Adds a text; `key` identifies it in each `Part`."""
        ...

    def remove(self, key: Any) -> None:
        """Ends a text, if it has not ended yet."""
        ...

    def advance(self) -> Iterator[list[Part]]:
        """Reads prompts and writes tokens for a short time; yields parts once they are written."""
        ...


class Writing:
    """A text that is being written.

    Args:
        row: the prompt, and how to continue it.
        stops: the tokens at which the text ends.

    Attributes:
        row: the argument.
        window: the tokens that the model sees: the prompt and the written tokens, or the newest.
        uniform: (length,), float32, the random numbers in [0, 1) that choose the text's tokens.
            They depend only on `row.seed` and `row.place`.
        done: the number of written tokens.
        ended: whether the text has ended.
    """

    def __init__(self, row: Row, stops: Sequence[int]):
        self.row, self._stops = row, stops
        self.window: Tokens = [*row.prompt]
        self.uniform = np.random.default_rng((row.seed, row.place)).random(row.length, np.float32)
        self.done, self.ended = 0, False

    def extend(self, tokens: Sequence[int]) -> Tokens:
        """Appends tokens up to the text's length; returns those before the first stop token."""
        kept = list(itertools.islice(tokens, self.row.length - self.done))
        self.window += kept
        self.done += len(kept)
        stopped = not set(self._stops).isdisjoint(kept)
        self.ended = stopped or self.done == self.row.length
        return list(itertools.takewhile(lambda token: token not in self._stops, kept))

    def build_part(self, key: Any, tokens: Sequence[int], end: int) -> Part:
        """Appends tokens; returns them as a `Part`, with an error if logits were not finite.

        Args:
            key: the key of the text.
            tokens: the tokens.
            end: the index of the first token whose logits were not finite; if none, `len(tokens)`.
        """
        found = self.extend(tokens[:end])
        if self.ended or end >= len(tokens):
            return Part(key, found, self.ended)
        self.ended = True
        return Part(key, found, True, NotFiniteError())


class _Reading:
    """A prompt that is read in chunks, before its text joins the others."""

    def __init__(self, key: Any, text: Writing, context: int):
        self.key, self.text = key, text
        if len(text.window) >= context:  # leaves half a context for new tokens
            text.window = text.window[-(context // 2) :]
        self.state: Nest = None
        self.read = 0


class RunningBatch:
    """A batch of texts, each at its own position in the context; see `Batch`.

    Each text is a row of one state (`Decoding`). A prompt is read alone, in chunks between two
    calls that write, and its row is then inserted into the state. Of a text that fills the context,
    the second half is read again as a prompt. A row does not depend on the others.

    Args:
        programs: the compiled functions of the model.
        tokens: the size of the vocabulary, as for `Sampling`.
        before_compiling: a function that is called with a description of texts whose program must
            be compiled first.
    """

    def __init__(self, programs: Programs, tokens: int, before_compiling: Callable[[str], None]):
        self._programs, self._tokens = programs, tokens
        self._before_compiling = before_compiling
        self._context = programs.decoding.context
        self._readings: deque[_Reading] = deque()
        self._rows: list[tuple[Any, Writing] | None] = []
        self._state: Nest = None
        self._slots = 0
        self._slot = 0  # the ring slot of the next token
        self._spare = 0
        self._step_s = _CALL_S / _SHORT  # seconds to write one token of every row

    def __len__(self) -> int:
        return len(self._readings) + sum(row is not None for row in self._rows)

    def add(self, key: Any, row: Row) -> None:
        """Adds a text."""
        self._read_later(key, Writing(row, self._programs.stops))

    def remove(self, key: Any) -> None:
        """Ends a text."""
        self._readings = deque(r for r in self._readings if r.key != key)
        self._rows = [None if row is not None and row[0] == key else row for row in self._rows]
        self._free_if_empty()

    def advance(self) -> Iterator[list[Part]]:
        """Reads about one chunk of prompt tokens, and writes some tokens of all rows."""
        budget = self._programs.decoding.chunk
        while self._readings and budget > 0:
            size, part = self._read_chunk(self._readings[0])
            budget -= size
            if part is not None:
                yield [part]
        if any(self._rows):
            yield self._write()
        self._free_if_empty()

    def _free_if_empty(self) -> None:
        """Frees the state's memory once no text is left."""
        if not len(self):
            self._rows, self._state, self._slots = [], None, 0

    def _read_later(self, key: Any, text: Writing) -> None:
        self._readings.append(_Reading(key, text, self._context))

    def _read_chunk(self, reading: _Reading) -> tuple[int, Part | None]:
        """Reads a chunk; returns its padded length, and after the last one the first new token."""
        text, start = reading.text, reading.read
        size = self._programs.find_prompt_size(len(text.window), self._tokens)
        if start == 0 and not self._programs.has_compiled(size):
            self._before_compiling(size.describe())
        chunk = text.window[start : start + size.time]
        padded = np.zeros((1, size.time), np.int32)
        padded[0, : len(chunk)] = chunk
        lengths = np.array([len(chunk)], np.int32)
        uniform = text.uniform[text.done : text.done + 1]
        rules = gather_rules([text.row.sampling])
        reading.state, token, finite = self._programs.read(
            size, reading.state, padded, start, lengths, uniform, rules
        )
        reading.read += len(chunk)
        length, is_finite = len(text.window), bool(np.array(finite)[0])
        if is_finite and reading.read < length:
            return size.time, None
        self._readings.popleft()
        part = text.build_part(reading.key, np.array(token).tolist(), int(is_finite))
        if self._can_continue(reading.key, text):
            self._insert(reading, length)
        return size.time, part

    def _can_continue(self, key: Any, text: Writing) -> bool:
        """Returns whether a row stays in the state; queues it to be reread if it is full."""
        is_full = len(text.window) >= self._context
        if is_full and not text.ended:
            self._read_later(key, text)
        return not (is_full or text.ended)

    def _insert(self, reading: _Reading, length: int) -> None:
        """Inserts a row into the state after its whole prompt, of `length` tokens, was read."""
        if None not in self._rows or self._slots < length:
            rows = 1 + len(self)  # room for all waiting texts, to resize only once
            slots = min(length + EVERY, self._context)
            self._resize(self._find_size(rows, slots), reading.state)
        index = self._rows.index(None)
        row = keras.tree.map_structure(lambda x: _fit(x, self._slots), reading.state)
        first = (self._slot - length) % self._slots
        self._state = self._programs.insert(self._size, self._state, row, index, first)
        self._rows[index] = reading.key, reading.text

    @property
    def _size(self) -> Size:
        return Size(len(self._rows), self._slots, self._tokens)

    def _find_size(self, rows: int, slots: int) -> Size:
        """Returns a size with room for `rows`, `slots` and the present texts."""
        longest = max((len(row[1].window) for row in self._rows if row), default=0)
        size = self._programs.choose_size(rows, max(slots, longest), self._tokens)
        if not self._programs.has_compiled(size):
            self._before_compiling(size.describe())
        return size

    def _resize(self, size: Size, like: Nest) -> None:
        """Resizes the state; rows that have ended leave it, and the others move up.

        Args:
            size: the new size.
            like: a state of any size, the template for an empty one.
        """
        kept = [n for n, row in enumerate(self._rows) if row is not None]
        before, self._slots = self._slots, size.slots
        found: list[tuple[Any, Writing] | None] = [self._rows[n] for n in kept]
        self._rows = found + [None] * (size.rows - len(kept))
        self._spare = 0
        if not kept:
            self._state, self._slot = self._programs.build_state(size, like), 0
            return
        rows = np.array(kept + [kept[0]] * (size.rows - len(kept)))
        # The oldest token comes first, so that a longer ring has its free slots after the newest.
        oldest = self._slot + max(0, before - size.slots)
        order = (oldest + np.arange(size.slots)) % before
        self._state = keras.tree.map_structure(
            lambda x: ops.take(ops.take(x, rows, axis=0), order, axis=1), self._state
        )
        self._slot = before % size.slots if before < size.slots else 0

    def _write(self) -> list[Part]:
        """Writes some tokens of each row, and returns them."""
        left = [self._count_left(row[1]) for row in self._rows if row is not None]
        most = _SHORT if self._readings else max(1, int(_CALL_S / self._step_s))
        count = min(max(left), most, EVERY)
        self._make_room(count)
        texts = [None if row is None else row[1] for row in self._rows]
        size, start = self._size, time.perf_counter()
        is_new = not self._programs.has_compiled(size)
        self._state, written, ends = self._programs.write(
            size, self._state, _gather_rows(texts), self._slot, _gather_uniform(texts), count
        )
        tokens = np.array(written)[:, :count]
        if not is_new:
            self._step_s = (time.perf_counter() - start) / count
        self._slot = (self._slot + count) % self._slots
        return self._take(tokens, np.array(ends))

    def _count_left(self, text: Writing) -> int:
        return min(text.row.length - text.done, self._context - len(text.window))

    def _make_room(self, count: int) -> None:
        """Resizes the state if the next tokens do not fit, or after many calls with unused room."""
        longest = max(len(row[1].window) for row in self._rows if row is not None)
        need = min(longest + count, self._context)
        if need > self._slots:
            self._resize(self._find_size(len(self), need), self._state)
            return
        size = self._programs.choose_size(len(self), need, self._tokens)
        is_smaller = size.rows * size.slots < len(self._rows) * self._slots
        self._spare = self._spare + 1 if is_smaller and self._programs.has_compiled(size) else 0
        if self._spare > _SPARE:
            self._resize(size, self._state)

    def _take(self, tokens: np.ndarray, ends: np.ndarray) -> list[Part]:
        """Returns the new tokens of all rows, as parts; `ends` comes from `Loop.write`."""
        parts = []
        for index, row in enumerate(self._rows):
            if row is None:
                continue
            key, text = row
            room = self._context - len(text.window)
            parts.append(text.build_part(key, tokens[index, :room].tolist(), ends[index]))
            if not self._can_continue(key, text):
                self._rows[index] = None
        return parts


def _gather_rows(texts: Sequence[Writing | None]) -> dict[str, Any]:
    """Returns the argument `rows` of `Loop.write`; rows without a text choose greedily."""
    return {
        "token": np.array([text.window[-1] if text else 0 for text in texts], np.int32),
        "position": np.array([len(text.window) - 1 if text else 0 for text in texts], np.int32),
        "rules": gather_rules([text.row.sampling if text else Sampling(0) for text in texts]),
    }


def _gather_uniform(texts: Sequence[Writing | None]) -> np.ndarray:
    """Returns the random numbers for each text's next `EVERY` tokens, (texts, EVERY), float32."""
    found = np.zeros((len(texts), EVERY), np.float32)
    for numbers, text in zip(found, texts):
        if text is not None:
            following = text.uniform[text.done : text.done + EVERY]
            numbers[: len(following)] = following
    return found


def _fit(x: Any, slots: int) -> Any:
    """Pads or truncates an array (1, any, ...) to (1, slots, ...); removes only empty slots."""
    missing = max(0, slots - x.shape[1])
    return ops.pad(x[:, :slots], ((0, 0), (0, missing), *[(0, 0)] * (len(x.shape) - 2)))
