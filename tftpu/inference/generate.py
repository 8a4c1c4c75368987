"""Text by a language model: token after token, in one compiled loop on the device."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.engines import functions
from tftpu.engines.functions import Compile
from tftpu.errors import UserError
from tftpu.inference.decoding import Recomputed, decoding_of
from tftpu.inference.loop import Loop
from tftpu.inference.sampling import Sampling

Tokens = list[int]
_PROMPT = 64  # prompts are padded to a multiple of it, so that few lengths are compiled


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
    writer = Writer(model, sampling or Sampling(), stop, context)
    found: list[Tokens] = [[] for _ in prompts]
    for parts in writer.write(prompts, length, seed, every=length):
        for row, part in zip(found, parts):
            row += part
    return found


class Writer:
    """Continues prompts; what was compiled for one shape of prompts serves all of that shape.

    Args:
        model, sampling, stop, context: as for `generate`.
        compiled: compiles its functions, such as `Executor.compiled`; None: for the model as it is.

    Raises:
        UserError: the model does not predict the next token.
    """

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        stop: int | None = None,
        context: int | None = None,
        compiled: Compile | None = None,
    ):
        self._decoding = decoding_of(model, context)
        self._stop = stop
        compiled = compiled or functools.partial(functions.compiled, model)
        loop = Loop(self._decoding, sampling, stop)
        self._read, self._write = compiled(loop.read), compiled(loop.write)
        if isinstance(self._decoding, Recomputed):
            _check_order(self._decoding, compiled, model.name)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        seed: int = 0,
        every: int = 16,
        first: int = 0,
    ) -> Iterator[list[Tokens]]:
        """Yields the next tokens of each row, up to `every` of them, until all rows have ended.

        Args:
            prompts, length, seed: as for `generate`.
            every: tokens that are written between two results.
            first: place of the first row among all, if they are given in parts.
        """
        rows = self.check(prompts, length)
        if every < 1 or seed < 0:
            raise UserError(f"every={every}, seed={seed}: give 1 or more, and 0 or more.")
        uniform = _uniform(range(first, first + len(rows)), length + every + 1, seed)
        ended, done, context = np.zeros(len(rows), bool), 0, self._decoding.context
        while done < length and not ended.all():
            # A row that fills the context keeps the last half of it, and one that ended
            # takes no more room than it must; the others are read again as they are.
            kept = [row[:1] if end else row for row, end in zip(rows, ended)]
            rows = [row if len(row) < context else row[-(context // 2) :] for row in kept]
            count = min(context - max(map(len, rows)), length - done)
            read = [[*row] for row in rows]
            for parts in self._round(read, count, uniform[:, done:], min(every, count), ended):
                for row, part in zip(rows, parts):
                    row += part
                done += len(parts[0])
                yield [self._until_stop(ended, index, part) for index, part in enumerate(parts)]
                if ended.all():
                    return

    def _round(
        self, rows: list[Tokens], length: int, uniform: np.ndarray, every: int, ended: np.ndarray
    ) -> Iterator[list[Tokens]]:
        """Yields the next tokens of rows that fit the context together with them."""
        lengths = np.array([len(row) for row in rows], np.int32)
        time = min(-(-int(lengths.max()) // _PROMPT) * _PROMPT, self._decoding.context)
        tokens = np.zeros((len(rows), time), np.int32)
        for padded, row in zip(tokens, rows):
            padded[: len(row)] = row
        calls = -(-length // every)
        state = self._read(tokens, lengths, uniform[:, 0], ended.copy(), time + calls * every)
        for done in range(0, calls * every, every):
            following = uniform[:, done + 1 : done + every + 1]
            state, written = self._write(state, lengths, following, every)
            if not np.array(state["finite"]):
                raise UserError(
                    "The model predicts values that are not finite, from which no token can be "
                    "drawn: its weights or its precision are at fault."
                )
            yield np.array(written)[:, : length - done].tolist()

    def _until_stop(self, ended: np.ndarray, index: int, row: Tokens) -> Tokens:
        """Returns a row up to its stop, where it ends; nothing if it has ended before."""
        if ended[index]:
            return []
        if self._stop in row:
            ended[index] = True
            return row[: row.index(self._stop)]
        return row

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


def _uniform(rows: range, count: int, seed: int) -> np.ndarray:
    """Returns numbers of [0, 1), (rows, count), float32; those of a row do not depend on others."""
    found = [np.random.default_rng((seed, row)).random(count, np.float32) for row in rows]
    return np.stack(found)
