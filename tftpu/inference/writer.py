"""Writes the tokens of several rows together, in programs that few sizes need."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tftpu.engines import functions
from tftpu.engines.functions import Compile
from tftpu.errors import UserError
from tftpu.inference.decoding import Recomputed, build_decoding
from tftpu.inference.loop import Choose, Loop
from tftpu.inference.sampling import Sampling, choose, gather_rules

Tokens = list[int]
_FEW = 16  # tokens that are always written together; unwanted ones are cut off
ROOM = 128  # tokens that a row has room for at least, so that short texts share a program
_USUAL = 512  # tokens of a prompt, and of a text, up to which programs are compiled ahead
_PROMPT = 64  # the length that the shortest prompts are padded to


class Row(NamedTuple):
    """A text to write.

    Attributes:
        prompt: its tokens.
        length: the most tokens to write.
        sampling: the rule by which tokens are drawn.
        seed, place: the seed and the place of the random numbers that choose tokens.
    """

    prompt: Sequence[int]
    length: int
    sampling: Sampling
    seed: int = 0
    place: int = 0


def build_rows(
    prompts: Sequence[Sequence[int]], length: int, sampling: Sampling, seed: int = 0
) -> list[Row]:
    """Returns a row for each prompt, in their order."""
    return [Row(p, length, sampling, seed, n) for n, p in enumerate(prompts)]


class Chunk(NamedTuple):
    """The next tokens of all rows.

    Attributes:
        tokens: the next tokens of each row.
        ended: whether a row has ended.
    """

    tokens: list[Tokens]
    ended: list[bool]


class Size(NamedTuple):
    """A size for which a program is compiled.

    Attributes:
        rows: the number of rows that are written together.
        prompt: the number of tokens to which prompts are padded.
        room: the number of tokens that can be written after the prompts.
        every: the number of tokens that one call writes.
        tokens: the size of the vocabulary, as for `Sampling`.
    """

    rows: int
    prompt: int
    room: int
    every: int
    tokens: int

    @property
    def slots(self) -> int:
        """The number of tokens of a row, including padding."""
        return self.prompt + self.room


class Writer:
    """Continues prompts. Its functions are compiled once for each shape of prompts.

    Args:
        model, stop, context: as for `generate.generate`.
        compiled: a function that compiles its functions, such as `Executor.compiled`; None: the
            default for the model.

    Raises:
        UserError: the model does not predict the next token.
    """

    def __init__(
        self,
        model: Any,
        stop: int | Sequence[int] | None = None,
        context: int | None = None,
        compiled: Compile | None = None,
    ):
        self._decoding = self._build_decoding(model, context)
        self._stops = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
        self._compiled = compiled or functools.partial(functions.compile_function, model)
        # Functions of their own for each size: while one is traced, another thread can call others.
        self._loops: dict[Size, tuple[Any, Any]] = {}
        self._adding = threading.Lock()
        self._known: set[Size] = set()  # sizes that are compiled
        if isinstance(self._decoding, Recomputed):
            _check_order(self._decoding, self._compiled, model.name)

    def _build_decoding(self, model: Any, context: int | None) -> Any:
        return build_decoding(model, context)

    def _build_loop(self, choose: Choose) -> Any:
        return Loop(self._decoding, choose, self._stops)

    def write(self, rows: Sequence[Row], every: int = 16) -> Iterator[list[Tokens]]:
        """Yields the next tokens of each row, up to `every` of them, until all rows have ended."""
        return (chunk.tokens for chunk in self.iterate_chunks(rows, every))

    def iterate_chunks(
        self,
        rows: Sequence[Row],
        every: int = 16,
        before_compiling: Callable[[Size], None] = lambda size: None,
    ) -> Iterator[Chunk]:
        """Yields the next tokens of each row, and which rows have ended.

        Args:
            rows: the rows, each with its own rule.
            every: the number of tokens that are written between two results.
            before_compiling: a function that is called with the size of the next chunk, if its
                program must be compiled first.

        Raises:
            UserError: a row cannot be written.
        """
        length = max((row.length for row in rows), default=0)
        texts = self.check([row.prompt for row in rows], length)
        if every < 1 or min(row.seed for row in rows) < 0:
            seeds = sorted({row.seed for row in rows})
            raise UserError(
                f"every={every} and seed={seeds[0]}: every must be 1 or more, and seed 0 or more."
            )
        uniform = _draw_uniform(rows, length + every + 1)
        ended, done, context = np.zeros(len(rows), bool), 0, self._decoding.context
        while done < length and not ended.all():
            # A row that fills the context keeps its second half. A row that has ended is shortened
            # to one token. The other rows are read again unchanged.
            kept = [text[:1] if end else text for text, end in zip(texts, ended)]
            texts = [text if len(text) < context else text[-(context // 2) :] for text in kept]
            count = min(context - max(map(len, texts)), length - done)
            read = [[*text] for text in texts]
            # The number of tokens is rounded up so that few sizes are compiled. Surplus tokens are
            # cut off.
            size = min(every, max(_FEW, 1 << (count - 1).bit_length()))
            for parts in self._generate_round(
                rows, read, count, uniform[:, done:], size, ended, before_compiling
            ):
                for text, part in zip(texts, parts):
                    text += part
                found = [
                    self._cut_at_end(ended, index, part, row.length - done)
                    for index, (row, part) in enumerate(zip(rows, parts))
                ]
                done += len(parts[0])
                yield Chunk(found, ended.tolist())
                if ended.all():
                    return

    def _generate_round(
        self,
        rows: Sequence[Row],
        texts: list[Tokens],
        length: int,
        uniform: np.ndarray,
        every: int,
        ended: np.ndarray,
        before_compiling: Callable[[Size], None],
    ) -> Iterator[list[Tokens]]:
        """Yields the next tokens of texts; both must fit into the context together."""
        lengths = np.array([len(text) for text in texts], np.int32)
        time = min(round_up_length(int(lengths.max())), self._decoding.context)
        tokens = pad_texts(texts, time)
        calls = -(-length // every)
        size = Size(len(texts), time, _round_up_room(calls, every), every, find_tokens(rows))
        if size not in self._known:
            before_compiling(size)
        read, write = self._compile_loop(size)
        numbers = gather_rules([row.sampling for row in rows])
        state = read(tokens, lengths, uniform[:, 0], numbers, ended.copy(), size.slots)
        for done in range(0, calls * every, every):
            following = uniform[:, done + 1 : done + every + 1]
            state, written = write(state, lengths, following, every)
            self._check_finite(state)
            self._known.add(size)
            yield np.array(written)[:, : length - done].tolist()

    def _check_finite(self, state: Any) -> None:
        if not np.array(state["finite"]):
            raise UserError(
                "The model predicts values that are not finite, so no token can be drawn: the "
                "cause is in its weights or its precision."
            )

    def compile(self, size: Size) -> None:
        """Compiles the program of a size; another thread may write with other sizes meanwhile."""
        if size in self._known:
            return
        read, write = self._compile_loop(size)
        lengths, uniform = np.ones(size.rows, np.int32), np.zeros((size.rows, size.every + 1))
        uniform = uniform.astype(np.float32)
        rules, ended = gather_rules([Sampling(0)] * size.rows), np.ones(size.rows, bool)
        tokens = np.zeros((size.rows, size.prompt), np.int32)
        state = read(tokens, lengths, uniform[:, 0], rules, ended, size.slots)
        _, written = write(state, lengths, uniform[:, 1:], size.every)
        np.array(written)  # waits for the device
        self._known.add(size)

    def list_usual_sizes(self, most: int, every: int = 16, tokens: int = 0) -> list[Size]:
        """Returns the sizes of most requests, the smallest first.

        Args:
            most: the most rows that are written at once.
            every: as for `write`.
            tokens: the size of the vocabulary, as for `Sampling`.
        """
        context = self._decoding.context
        short = min(_PROMPT, context)
        usual = min(_USUAL, context)
        shapes = [(1, short, ROOM)]
        shapes += [(rows, short, ROOM) for rows in (2, 4, 8) if rows <= most]
        shapes += [(1, time, ROOM) for time in _list_lengths(usual) if time > short]
        shapes += [(1, short, room) for room in (2 * ROOM, 4 * ROOM) if room < 2 * usual]
        return [Size(rows, time, room, every, tokens) for rows, time, room in shapes]

    def _compile_loop(self, size: Size) -> tuple[Any, Any]:
        """Returns the functions that read prompts and write; the first call compiles them."""
        with self._adding:
            if size not in self._loops:
                loop = self._build_loop(functools.partial(choose, tokens=size.tokens))
                self._loops[size] = self._compiled(loop.read), self._compiled(loop.write)
            return self._loops[size]

    def _cut_at_end(self, ended: np.ndarray, index: int, part: Tokens, room: int) -> Tokens:
        """Returns a row's next tokens up to its stop token or its length; none if it has ended."""
        if ended[index]:
            return []
        kept = part[:room]
        stopped = not set(self._stops).isdisjoint(kept)
        ended[index] = stopped or len(kept) == room
        return list(itertools.takewhile(lambda token: token not in self._stops, kept))

    def check(self, prompts: Sequence[Sequence[int]], length: int) -> list[Tokens]:
        """Returns the tokens of prompts.

        Raises:
            UserError: the prompts cannot be continued.
        """
        if not isinstance(length, int) or length < 1:
            raise UserError(f"length={length}: give the number of tokens to write, 1 or more.")
        arrays = [np.asarray(prompt) for prompt in prompts]
        if any(a.ndim != 1 or (a.size and a.dtype.kind not in "iu") for a in arrays):
            raise UserError("Give prompts as a list of rows of token ids, such as [[1, 2], [3]].")
        if not arrays or not all(array.size for array in arrays):
            raise UserError("A prompt is empty: give at least one character, or token.")
        rows, vocabulary = [array.tolist() for array in arrays], self._decoding.vocabulary
        unknown = {token for row in rows for token in row if not 0 <= token < vocabulary}
        if unknown:
            raise UserError(
                f"The prompts contain the tokens {sorted(unknown)[:5]}, but the model's "
                f"vocabulary goes from 0 to {vocabulary - 1}: use the model's own tokenizer."
            )
        return rows


def _check_order(decoding: Recomputed, compiled: Compile, name: str) -> None:
    """Raises `UserError` for a model whose logits after a token depend on later tokens."""
    rng, time = np.random.default_rng(0), decoding.context
    # The last equal token of each row; rows are compared in pairs.
    places = np.array([0, 0, time // 2, time // 2], np.int32)
    tokens = rng.integers(1, max(2, decoding.vocabulary), (4, time), np.int32)
    for row, place in zip((1, 3), places[1::2]):
        tokens[row, : place + 1] = tokens[row - 1, : place + 1]
    _, logits = compiled(decoding.read)(tokens, places + 1, time)
    rows = np.asarray(logits, np.float32)
    if np.abs(rows[0::2] - rows[1::2]).max() > 1e-3 * np.abs(rows).max():
        raise UserError(
            f"The model {name!r} does not continue texts: its predictions after a token depend on "
            "later tokens. Only causal models can write."
        )


def pad_texts(texts: Sequence[Tokens], slots: int) -> np.ndarray:
    """Returns the tokens of texts, (texts, slots), int32, with zeros at their end."""
    tokens = np.zeros((len(texts), slots), np.int32)
    for padded, text in zip(tokens, texts):
        padded[: len(text)] = text
    return tokens


def round_up_length(length: int) -> int:
    """Rounds up to 64, 96, 128, 192, 256, and so on, so that few lengths are compiled."""
    whole = _PROMPT << (-(-length // _PROMPT) - 1).bit_length()
    three_quarters = 3 * whole // 4
    return three_quarters if whole > _PROMPT and length <= three_quarters else whole


def _list_lengths(most: int) -> list[int]:
    """Returns the lengths that prompts of up to `most` tokens are padded to."""
    return sorted({min(round_up_length(length), most) for length in range(1, most + 1)})


def _round_up_room(calls: int, every: int) -> int:
    """Returns the room for some calls, rounded up to a power of two so that few are compiled."""
    return max(ROOM, every * (1 << (calls - 1).bit_length()))


def find_tokens(rows: Sequence[Row]) -> int:
    """Returns the size of the vocabulary from which tokens are chosen."""
    found, *others = {row.sampling.tokens for row in rows}
    if others:
        raise ValueError(f"All rows must have one vocabulary, but these have {[found, *others]}.")
    return found


def _draw_uniform(rows: Sequence[Row], count: int) -> np.ndarray:
    """Returns numbers on [0, 1), (rows, count), float32, independent of other rows."""
    found = [np.random.default_rng((r.seed, r.place)).random(count, np.float32) for r in rows]
    return np.stack(found)
