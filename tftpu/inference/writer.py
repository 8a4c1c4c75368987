"""Continues prompts with a language model."""

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tftpu.engines import functions
from tftpu.engines.functions import Compile
from tftpu.errors import NotFiniteError, UserError
from tftpu.inference.batch import Batch, RunningBatch
from tftpu.inference.decoding import Recomputed, build_decoding
from tftpu.inference.programs import Programs
from tftpu.inference.rows import Row, Tokens, find_tokens


class Writer:
    """Continues prompts. Its functions are compiled once for each size of texts.

    Args:
        model, stop, context: as for `generate.generate`.
        compiled: a function that compiles a function, such as `Executor.compiled`; None: the
            default for the model.

    Attributes:
        programs: the compiled functions of the writer.

    Raises:
        UserError: the model does not predict the next token, or `context` is too large for it.
    """

    programs: Any  # its class differs between kinds of writers

    def __init__(
        self,
        model: Any,
        stop: int | Sequence[int] | None = None,
        context: int | None = None,
        compiled: Compile | None = None,
    ):
        given: Any = () if stop is None else stop
        stops: Any = (given,) if isinstance(given, numbers.Integral) else tuple(given)
        used = compiled or functools.partial(functions.compile_function, model)
        self.programs = self._build_programs(model, context, used, stops)

    def _build_programs(
        self, model: Any, context: int | None, compiled: Compile, stops: Sequence[int]
    ) -> Any:
        decoding = build_decoding(model, context)
        if isinstance(decoding, Recomputed):
            _check_order(decoding, compiled, model.name)
        return Programs(decoding, compiled, stops)

    def open_batch(
        self, tokens: int, before_compiling: Callable[[str], None] = lambda texts: None
    ) -> Batch:
        """Returns an empty batch of texts.

        Args:
            tokens: the size of the vocabulary, as for `Sampling`.
            before_compiling: a function that is called with a description of texts whose program
                must be compiled first.
        """
        return RunningBatch(self.programs, tokens, before_compiling)

    def write(self, rows: Sequence[Row]) -> Iterator[list[Tokens]]:
        """Yields the next tokens of each row, some at a time, until all rows have ended.

        Raises:
            UserError: a prompt, a length or a seed is invalid.
            NotFiniteError: logits of some rows are not finite; raised after the other rows ended.
        """
        self.check([row.prompt for row in rows], max((row.length for row in rows), default=1))
        if min(row.seed for row in rows) < 0:
            raise UserError(f"seed={min(row.seed for row in rows)}: give 0 or more.")
        batch = self.open_batch(find_tokens(rows))
        for index, row in enumerate(rows):
            batch.add(index, row)
        failed: list[int] = []
        while len(batch):
            for parts in batch.advance():
                found: list[Tokens] = [[] for _ in rows]
                for part in parts:
                    found[part.key] += part.tokens
                failed += [part.key for part in parts if part.error]
                yield found
        if failed:
            raise NotFiniteError(failed)

    def check(self, prompts: Sequence[Sequence[int]], length: int) -> list[Tokens]:
        """Checks prompts and the number of tokens to write; returns the prompts as lists.

        Raises:
            UserError: the prompts cannot be continued.
        """
        if not isinstance(length, numbers.Integral) or length < 1:
            raise UserError(f"length={length}: give the number of tokens to write, 1 or more.")
        arrays = [np.asarray(prompt) for prompt in prompts]
        if any(a.ndim != 1 or (a.size and a.dtype.kind not in "iu") for a in arrays):
            raise UserError("Give prompts as a list of rows of token ids, such as [[1, 2], [3]].")
        if not arrays:
            raise UserError("There is no prompt: give at least one row of token ids, as [[1, 2]].")
        if not all(array.size for array in arrays):
            raise UserError("A prompt is empty: give at least one token, such as a word.")
        rows = [array.tolist() for array in arrays]
        vocabulary = self.programs.decoding.vocabulary
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
    # The rows of a pair have equal tokens up to this index, so their next logits must be equal.
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
