"""Runs a model over rows of tokens, one token after another, with and without a cache."""

from typing import Any, Protocol

import keras

from tftpu import sharding
from tftpu.errors import UserError
from tftpu.inference.cache import ROWS, Cache, Pair, open_cache
from tftpu.tensors import Nest, Tensor, ops

CHUNK = 256  # prompt tokens read at a time; in between, tokens of other texts are written
ROOM = 128  # minimum slots of a row, so that short texts share a program


class Decoding(Protocol):
    """Forward passes of a model, as functions that can be compiled.

    A state is a nest of arrays, (rows, slots, ...). The slots of a state of several rows are a
    ring: at each step all rows write their next token to the same slot, so only one slice changes.
    A row's tokens are in the slots up to this one; the slot of its first token can be any.

    Attributes:
        context: the maximum length of a row, in tokens.
        vocabulary: the number of tokens in the model's vocabulary.
        chunk: the most tokens of a prompt that are read in one pass.
        least_slots: the fewest slots that a state of several rows has.
    """

    context: int
    vocabulary: int
    chunk: int
    least_slots: int

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts, or their first chunks, into the first slots of a new state.

        Args:
            tokens: (batch, time), int32, padded at the end.
            lengths: (batch,), int32, the number of tokens without padding.
            slots: the number of slots.

        Returns:
            The state, and the logits of the next token, (batch, vocabulary).
        """
        ...

    def read_more(
        self, state: Nest, tokens: Tensor, start: Tensor, lengths: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads the next chunks of prompts into the slots from `start`, () int32; see `read`."""
        ...

    def step(
        self, state: Nest, token: Tensor, position: Tensor, slot: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row; returns the state and the logits, as `read` does.

        Args:
            state: the state from the previous pass.
            token: (batch,), int32.
            position: (batch,), int32, the number of tokens of the row before this one.
            slot: () int32, the slot of this token in the ring.
        """
        ...


class Cached:
    """Forward passes of a model that keep the keys and values of earlier tokens in a cache.

    Args:
        model: a GPT or a Llama of `tftpu.models`.
        context: the most tokens that a row may have; None: as many as the model takes.

    Raises:
        UserError: `context` is more than the model takes.
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
        self.chunk = min(CHUNK, self.context)
        self.least_slots = min(ROOM, self.context)

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts; see `Decoding.read`."""
        with open_cache(Cache(slots)) as cache:
            return self._read({"tokens": tokens}, lengths, cache)

    def read_more(
        self, state: Nest, tokens: Tensor, start: Tensor, lengths: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads the next chunks of prompts; see `Decoding.read_more`."""
        place = start + ops.arange(tokens.shape[1], dtype="int32")
        pairs = {name: Pair(*pair) for name, pair in state.items()}
        slots = next(iter(pairs.values())).keys.shape[1]
        visible = ops.arange(slots, dtype="int32")[None, None] <= place[None, :, None]
        # Padding may reach beyond the context; no token attends to it.
        positions = ops.minimum(place, self.context - 1)[None]
        with open_cache(Cache(slots, pairs, start, visible)) as cache:
            return self._read({"tokens": tokens, "positions": positions}, lengths, cache)

    def _read(self, features: Nest, lengths: Tensor, cache: Cache) -> tuple[Nest, Tensor]:
        _, hidden, _ = self._model.factored_logits(features, training=False)
        last = ops.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return _map_pairs(cache), self._model.logits_of(last)[:, 0]

    def step(
        self, state: Nest, token: Tensor, position: Tensor, slot: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row; see `Decoding.step`."""
        pairs = {name: Pair(*pair) for name, pair in state.items()}
        slots = next(iter(pairs.values())).keys.shape[1]
        age = ops.mod(slot - ops.arange(slots, dtype="int32"), slots)  # 0: this step's slot
        visible = age[None, None] <= position[:, None, None]
        with open_cache(Cache(slots, pairs, slot, visible)) as cache:
            # A loop may continue beyond the context; its caller drops the tokens written there.
            place = ops.minimum(position, self.context - 1)
            features = {"tokens": _fill_rows(token), "positions": _fill_rows(place)}
            _, hidden, _ = self._model.factored_logits(features, training=False)
        logits = self._model.logits_of(hidden)[: token.shape[0], 0]
        return _map_pairs(cache), logits


class Recomputed:
    """Forward passes of any causal model, each of which computes the whole row again.

    Args:
        model: a Keras model that maps tokens, (batch, context), to logits, (batch, context,
            vocabulary).
        context: the number of tokens in a row; None: the size of the model's input.

    Raises:
        UserError: the model has other inputs or outputs, is not built, or has no known context.
    """

    def __init__(self, model: Any, context: int | None = None):
        # A user's model may have several inputs, or an input of another rank.
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
        self.context = self.chunk = self.least_slots = found
        self.vocabulary = vocabulary

    def read(self, tokens: Tensor, lengths: Tensor, slots: int) -> tuple[Nest, Tensor]:
        """Reads prompts; see `Decoding.read`."""
        row = ops.pad(tokens, ((0, 0), (0, self.context - tokens.shape[1])))
        return row, self._compute_logits(row, lengths - 1)

    def read_more(
        self, state: Nest, tokens: Tensor, start: Tensor, lengths: Tensor
    ) -> tuple[Nest, Tensor]:
        """Raises `NotImplementedError`: unused, because `read` takes whole prompts."""
        raise NotImplementedError

    def step(
        self, state: Nest, token: Tensor, position: Tensor, slot: Tensor
    ) -> tuple[Nest, Tensor]:
        """Reads one more token of each row; see `Decoding.step`."""
        ring = ops.slice_update(state, (0, slot), token[:, None])
        place = ops.minimum(position, self.context - 1)[:, None]
        index = ops.arange(self.context, dtype="int32")[None]
        row = ops.take_along_axis(ring, ops.mod(slot - place + index, self.context), axis=1)
        row = ops.where(index <= place, row, 0)
        return ring, self._compute_logits(row, place[:, 0])

    def _compute_logits(self, row: Tensor, place: Tensor) -> Tensor:
        logits = self._model(row, training=False)
        found = ops.take_along_axis(logits, place[:, None, None], axis=1)[:, 0]
        return ops.cast(found, "float32")


def build_decoding(model: Any, context: int | None = None) -> Decoding:
    """Returns the forward passes of a model, with a cache if it supports one.

    Args:
        model: a model that predicts the next token.
        context: the most tokens that a row may have; None: as many as the model takes.

    Raises:
        UserError: the model does not predict tokens, or the context is too short or too long.
    """
    found = Cached(model, context) if hasattr(model, "logits_of") else Recomputed(model, context)
    check_context(found.context)
    return found


def check_context(context: int) -> None:
    """Raises `UserError` for a context without room for a prompt and a token."""
    if context < 2:
        raise UserError(f"A context of {context} is too small for a prompt and a token.")


def _explain_no_writer(model: Any, reason: str) -> UserError:
    why = reason.rstrip(".")
    return UserError(
        f"tftpu cannot write texts with the model {model.name!r}: it must take tokens, (batch, "
        f"time), and return logits of the next one, (batch, time, vocabulary). {why}."
    )


def _fill_rows(x: Tensor) -> Tensor:
    """Returns values, (batch,), as (batch, 1); on a TPU, pads them to at least `ROWS` rows."""
    missing = max(0, ROWS - x.shape[0]) if sharding.get_platform() == "tpu" else 0
    return ops.pad(x, ((0, missing),))[:, None]


def _map_pairs(cache: Cache) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the pairs of a cache as a nest that a loop can carry."""
    return {name: tuple(pair) for name, pair in cache.pairs.items()}
