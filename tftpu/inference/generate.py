"""Text by a language model: token after token, in one compiled loop on the device."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tftpu.engines import functions
from tftpu.engines.functions import Compile
from tftpu.errors import UserError
from tftpu.inference.decoding import Recomputed, build_decoding
from tftpu.inference.loop import Loop
from tftpu.inference.sampling import Choice, Sampling, gather_rules

Tokens = list[int]
_FEW = 16  # tokens that are written together even where fewer are wanted
_PROMPT = 64  # the length that the shortest prompts are padded to


def generate(
    model: keras.Model,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | None = None,
    context: int | None = None,
) -> list[Tokens]:
    """Returns the tokens with which a language model continues prompts.

    A row depends on its prompt, its place, and the seed, not on the other prompts. Where it fills
    the model's context or is longer, the last half of the context is read to go on.

    Args:
        model: the zoo's GPT or Llama, which keep keys and values of what they have read; or any
            causal Keras model from tokens, (batch, time), to logits, (batch, time, vocabulary),
            which reads the whole row again for each token.
        prompts: token ids of each row; lengths may differ, and none may be 0.
        length: tokens to write for each.
        sampling: the rule by which they are drawn; None draws from all, as they are likely.
        seed: of the numbers that decide.
        stop: a token after which a row ends; it is not returned.
        context: the most tokens to read at once; None: as many as the model says that it takes.

    Raises:
        UserError: a model that does not predict the next token, or a prompt that is empty or holds
            an unknown token.
    """
    writer = Writer(model, stop, context)
    found: list[Tokens] = [[] for _ in prompts]
    rows = build_rows(prompts, length, sampling or Sampling(), seed)
    for parts in writer.write(rows, every=length):
        for row, part in zip(found, parts):
            row += part
    return found


class Row(NamedTuple):
    """A text to write.

    Attributes:
        prompt: its tokens.
        length: the most tokens to write.
        sampling: the rule by which they are drawn.
        seed, place: of the numbers that decide.
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
        tokens: the next ones of each row.
        ended: whether a row has ended.
    """

    tokens: list[Tokens]
    ended: list[bool]


class Writer:
    """Continues prompts; what was compiled for one shape of prompts serves all of that shape.

    Args:
        model, stop, context: as for `generate`.
        compiled: compiles its functions, such as `Executor.compiled`; None: for the model as it is.

    Raises:
        UserError: the model does not predict the next token.
    """

    def __init__(
        self,
        model: Any,
        stop: int | None = None,
        context: int | None = None,
        compiled: Compile | None = None,
    ):
        self._decoding = build_decoding(model, context)
        self._stop = stop
        self._compiled = compiled or functools.partial(functions.compile_function, model)
        self._loops: dict[Choice, tuple[Any, Any]] = {}
        if isinstance(self._decoding, Recomputed):
            _check_order(self._decoding, self._compiled, model.name)

    def write(self, rows: Sequence[Row], every: int = 16) -> Iterator[list[Tokens]]:
        """Yields the next tokens of each row, up to `every` of them, until all rows have ended."""
        return (chunk.tokens for chunk in self.iterate_chunks(rows, every))

    def iterate_chunks(self, rows: Sequence[Row], every: int = 16) -> Iterator[Chunk]:
        """Yields the same, and which rows have ended.

        Args:
            rows: of one choice (`Sampling.choice`).
            every: tokens that are written between two results.

        Raises:
            UserError: a row that cannot be written.
        """
        length = max((row.length for row in rows), default=0)
        texts = self.check([row.prompt for row in rows], length)
        if every < 1 or min(row.seed for row in rows) < 0:
            seeds = sorted({row.seed for row in rows})
            raise UserError(f"every={every}, seed={seeds[0]}: give 1 or more, and 0 or more.")
        uniform = _draw_uniform(rows, length + every + 1)
        ended, done, context = np.zeros(len(rows), bool), 0, self._decoding.context
        while done < length and not ended.all():
            # A row that fills the context keeps the last half of it, and one that ended
            # takes no more room than it must; the others are read again as they are.
            kept = [text[:1] if end else text for text, end in zip(texts, ended)]
            texts = [text if len(text) < context else text[-(context // 2) :] for text in kept]
            count = min(context - max(map(len, texts)), length - done)
            read = [[*text] for text in texts]
            # Few sizes are compiled, whatever lengths are asked for; what is too much is cut off.
            size = min(every, max(_FEW, 1 << (count - 1).bit_length()))
            for parts in self._generate_round(rows, read, count, uniform[:, done:], size, ended):
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
    ) -> Iterator[list[Tokens]]:
        """Yields the next tokens of texts that fit the context together with them."""
        lengths = np.array([len(text) for text in texts], np.int32)
        time = min(_round_up_length(int(lengths.max())), self._decoding.context)
        tokens = np.zeros((len(texts), time), np.int32)
        for padded, text in zip(tokens, texts):
            padded[: len(text)] = text
        calls = -(-length // every)
        slots = time + every * (1 << (calls - 1).bit_length())  # few sizes are compiled
        read, write = self._compile_loop([row.sampling for row in rows])
        numbers = gather_rules([row.sampling for row in rows])
        state = read(tokens, lengths, uniform[:, 0], numbers, ended.copy(), slots)
        for done in range(0, calls * every, every):
            following = uniform[:, done + 1 : done + every + 1]
            state, written = write(state, lengths, following, every)
            if not np.array(state["finite"]):
                raise UserError(
                    "The model predicts values that are not finite, from which no token can be "
                    "drawn: its weights or its precision are at fault."
                )
            yield np.array(written)[:, : length - done].tolist()

    def _compile_loop(self, samplings: Sequence[Sampling]) -> tuple[Any, Any]:
        """Returns the compiled functions that read, and write."""
        choice, *others = {sampling.choice for sampling in samplings}
        if others:
            raise ValueError(f"The rows choose in several ways: {[choice, *others]}.")
        if choice not in self._loops:
            loop = Loop(self._decoding, choice, self._stop)
            self._loops[choice] = self._compiled(loop.read), self._compiled(loop.write)
        return self._loops[choice]

    def _cut_at_end(self, ended: np.ndarray, index: int, part: Tokens, room: int) -> Tokens:
        """Returns a row's next tokens up to its stop or its length; nothing if it has ended."""
        if ended[index]:
            return []
        kept = part[:room]
        stopped = self._stop in kept
        ended[index] = stopped or len(kept) == room
        return list(itertools.takewhile(lambda token: token != self._stop, kept))

    def check(self, prompts: Sequence[Sequence[int]], length: int) -> list[Tokens]:
        """Returns the tokens of prompts.

        Raises:
            UserError: they cannot be continued.
        """
        if not isinstance(length, int) or length < 1:
            raise UserError(f"length={length}: give the number of tokens to write, 1 or more.")
        arrays = [np.asarray(prompt) for prompt in prompts]
        if any(a.ndim != 1 or (a.size and a.dtype.kind not in "iu") for a in arrays):
            raise UserError("Give prompts as a list of rows of token ids, such as [[1, 2], [3]].")
        if not arrays or not all(array.size for array in arrays):
            raise UserError("A prompt is empty: give at least one token for each row.")
        rows, vocabulary = [array.tolist() for array in arrays], self._decoding.vocabulary
        unknown = {token for row in rows for token in row if not 0 <= token < vocabulary}
        if unknown:
            raise UserError(
                f"The prompts hold the tokens {sorted(unknown)[:5]}, and the model's vocabulary "
                f"goes from 0 to {vocabulary - 1}: use the model's own tokenizer."
            )
        return rows


def _check_order(decoding: Recomputed, compiled: Compile, name: str) -> None:
    """Refuses a model whose logits after a token change with those that come later."""
    rng, time = np.random.default_rng(0), decoding.context
    places = np.array([0, 0, time // 2, time // 2], np.int32)  # in pairs of rows
    tokens = rng.integers(1, max(2, decoding.vocabulary), (4, time), np.int32)
    for row, place in zip((1, 3), places[1::2]):
        tokens[row, : place + 1] = tokens[row - 1, : place + 1]
    _, logits = compiled(decoding.read)(tokens, places + 1, time)
    rows = np.asarray(logits, np.float32)
    if np.abs(rows[0::2] - rows[1::2]).max() > 1e-3 * np.abs(rows).max():
        raise UserError(
            f"The model {name!r} does not continue texts: what it predicts after a token depends "
            "on the tokens that come later. Only causal models can write."
        )


def _round_up_length(length: int) -> int:
    """Returns the next of 64, 96, 128, 192, 256, and so on: few lengths are compiled."""
    whole = _PROMPT << (-(-length // _PROMPT) - 1).bit_length()
    three_quarters = 3 * whole // 4
    return three_quarters if whole > _PROMPT and length <= three_quarters else whole


def _draw_uniform(rows: Sequence[Row], count: int) -> np.ndarray:
    """Returns numbers of [0, 1), (rows, count), float32; those of a row do not depend on others."""
    found = [np.random.default_rng((r.seed, r.place)).random(count, np.float32) for r in rows]
    return np.stack(found)
