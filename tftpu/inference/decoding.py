"""Runs a model over rows of tokens, one token after another, with and without a cache."""

from typing import Any, Protocol

import keras

from tftpu import sharding
from tftpu.errors import UserError
from tftpu.inference.cache import ROWS, Cache, Pair, open_cache
from tftpu.tensors import Nest, Tensor, ops


class Decoding(Protocol):
    """Passes of a model, as functions that can be compiled.

    Rows are padded at their end to the same length. Written tokens follow in slots that all rows
    share, so a row has a gap between its prompt and the first written token.

    Attributes:
        context: the most tokens that the model takes in a row.
        vocabulary: the number of tokens in the model's vocabulary.
    """

    context: int
    vocabulary: int

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts.

        Args:
            tokens: (batch, time), int32.
            lengths: (batch,), int32, the length of each prompt.
            slots: the number of tokens that a row will have, including padding.

        Returns:
            The state for the next pass, and the logits of the next token, (batch, vocabulary).
        """
        ...

    def step(
        self, state: Nest, token: Tensor, lengths: Tensor, first: Tensor, count: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row, and returns the same as `read`.

        Args:
            state: the state from the previous pass.
            token: (batch,), int32.
            lengths: the lengths of the prompts.
            first: () int32, the length of the prompts with their padding.
            count: () int32, the number of tokens that were written before this one.
        """
        ...


class Cached:
    """Passes of a language model of the zoo, whose attention keeps keys and values.

    Args:
        model: a GPT or a Llama of `tftpu.models`.
        context: the most tokens that a row may have; None: as many as the model takes.

    Raises:
        UserError: the model takes fewer tokens.
    """

    def __init__(self, model: Any, context: int | None = None):
        most = model.hyperparameters.context
        if context is not None and context > most:
            raise UserError(
                f"context={context} is too large: the model {model.name!r} takes at most {most} "
                "tokens."
            )
        self._model = model
        self.context = context or most
        self.vocabulary = model.hyperparameters.vocabulary

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts."""
        with open_cache(Cache(slots)) as cache:
            _, hidden, _ = self._model.factored_logits({"tokens": tokens}, training=False)
        last = ops.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return _map_pairs(cache), self._model.logits_of(last)[:, 0]

    def step(
        self, state: Nest, token: Tensor, lengths: Tensor, first: Tensor, count: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row."""
        pairs = {name: Pair(*pair) for name, pair in state.items()}
        slots = next(iter(pairs.values())).keys.shape[1]
        slot = ops.arange(slots, dtype="int32")[None]
        of_written = ops.logical_and(slot >= first, slot <= first + count)
        visible = ops.logical_or(slot < lengths[:, None], of_written)
        with open_cache(Cache(slots, pairs, first + count, visible)) as cache:
            # A loop may continue beyond the context. The tokens that it writes there are cut off.
            place = ops.minimum(lengths + count, self.context - 1)
            features = {"tokens": _fill_rows(token), "positions": _fill_rows(place)}
            _, hidden, _ = self._model.factored_logits(features, training=False)
        logits = self._model.logits_of(hidden)[: token.shape[0], 0]
        return _map_pairs(cache), logits


class Recomputed:
    """Passes of any causal model, each over the whole row.

    Args:
        model: a Keras model that maps tokens, (batch, context), to logits, (batch, context,
            vocabulary).
        context: the number of tokens in a row; None: the size of the model's input.

    Raises:
        UserError: it is not such a model, or its context is unknown.
    """

    def __init__(self, model: Any, context: int | None = None):
        # A user's own model may take any shape.
        shape = getattr(model, "input_shape", None) or (None, None)
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise _explain_no_writer(model, f"It takes {shape}.")
        found = context or shape[1]
        if not model.built or found is None:
            raise UserError(
                f"The model {model.name!r} takes any number of tokens, or is not built. Build it, "
                "and say with how many tokens it was trained, for example context=1024."
            )
        given = keras.KerasTensor((2, found), "int32")
        try:
            logits = model.compute_output_spec(given)
            _, _, vocabulary = logits.shape
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _explain_no_writer(model, reason) from error
        self._model = model
        self.context = found
        self.vocabulary = vocabulary

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts."""
        row = ops.pad(tokens, ((0, 0), (0, self.context - tokens.shape[1])))
        return row, self._compute_logits(row, lengths - 1)

    def step(
        self, state: Nest, token: Tensor, lengths: Tensor, first: Tensor, count: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row."""
        place = ops.minimum(lengths + count, self.context - 1)
        here = ops.arange(self.context, dtype="int32")[None] == place[:, None]
        row = ops.where(here, token[:, None], state)
        return row, self._compute_logits(row, place)

    def _compute_logits(self, row: Tensor, place: Tensor) -> Tensor:
        logits = self._model(row, training=False)
        found = ops.take_along_axis(logits, place[:, None, None], axis=1)[:, 0]
        return ops.cast(found, "float32")


def build_decoding(model: Any, context: int | None = None) -> Decoding:
    """Returns the passes of a model, with a cache if it supports one.

    Args:
        model: a model that predicts the next token.
        context: the most tokens that a row may have; None: as many as the model takes.

    Raises:
        UserError: it is not such a model, or the context is too short or too long.
    """
    found = Cached(model, context) if hasattr(model, "logits_of") else Recomputed(model, context)
    if found.context < 2:
        raise UserError(f"A context of {found.context} is too small for a prompt and a token.")
    return found


def _explain_no_writer(model: Any, reason: str) -> UserError:
    why = reason.rstrip(".")
    return UserError(
        f"tftpu cannot write texts with the model {model.name!r}: it must take tokens, (batch, "
        f"time), and return logits of the next one, (batch, time, vocabulary). {why}."
    )


def _fill_rows(x: Tensor) -> Tensor:
    """Returns (batch,) as (batch, 1); on a TPU, adds rows to fill a matrix."""
    missing = max(0, ROWS - x.shape[0]) if sharding.get_platform() == "tpu" else 0
    return ops.pad(x, ((0, missing),))[:, None]


def _map_pairs(cache: Cache) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the pairs of a cache as a nest that a loop can carry."""
    return {name: tuple(pair) for name, pair in cache.pairs.items()}
