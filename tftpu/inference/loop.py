"""The loop that writes tokens, in functions that can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.inference.decoding import Decoding
from tftpu.tensors import Nest, Tensor, ops

Choose = Callable[[Tensor, Tensor, Nest], Tensor]
EVERY = 16  # the most tokens that one call writes for each row


class Loop:
    """Reads prompts, and writes the tokens that follow them.

    Args:
        decoding: the forward passes of the model.
        choose: a function that returns a token for each row, given logits, random numbers in [0, 1)
            and rules; see `sampling.choose`.
    """

    def __init__(self, decoding: Decoding, choose: Choose):
        self._decoding = decoding
        self._choose = choose

    def read(
        self, tokens: Tensor, lengths: Tensor, uniform: Tensor, rules: Nest, slots: int
    ) -> tuple[Nest, Tensor, Tensor]:
        """Reads prompts, or their first chunks.

        Args:
            tokens, lengths, slots: as for `Decoding.read`.
            uniform: (batch,), float32, random numbers in [0, 1) that choose the next token.
            rules: the rules of the rows, as for `choose`.

        Returns:
            The state, the next token of each row, and whether its logits are finite, (batch,) bool.
        """
        state, logits = self._decoding.read(tokens, lengths, slots)
        return state, self._choose(logits, uniform, rules), is_finite(logits)

    def read_more(
        self,
        state: Nest,
        tokens: Tensor,
        start: Tensor,
        lengths: Tensor,
        uniform: Tensor,
        rules: Nest,
    ) -> tuple[Nest, Tensor, Tensor]:
        """Reads the next chunks of prompts, from the slot `start`; see `read`."""
        state, logits = self._decoding.read_more(state, tokens, start, lengths)
        return state, self._choose(logits, uniform, rules), is_finite(logits)

    def insert(self, state: Nest, row: Nest, index: Tensor, first: Tensor) -> tuple[Nest, Any]:
        """Puts the state of a single row into the state of several.

        Args:
            state: the state of several rows.
            row: the state of the single row, with the same number of slots.
            index: () int32, the index that the row gets in `state`.
            first: () int32, the slot of the ring into which the row's first slot goes.
        """

        def put(ring: Tensor, x: Tensor) -> Tensor:
            # A gather, because XLA would compile TensorFlow's slice again for each start.
            order = ops.mod(ops.arange(x.shape[1], dtype="int32") - first, x.shape[1])
            turned = ops.take(x, order, axis=1)
            return ops.slice_update(ring, (index, 0) + (0,) * (len(x.shape) - 2), turned)

        return keras.tree.map_structure(put, state, row), ()

    def write(
        self, state: Nest, rows: Nest, slot: Tensor, uniform: Tensor, count: Tensor
    ) -> tuple[Nest, Any]:
        """Writes tokens.

        Args:
            state: the state of the rows.
            rows: "token", (batch,) int32, the token of each row to read next; "position", its
                position, as for `Decoding.step`; and "rules", the rules of the rows.
            slot: () int32, the ring slot for `rows["token"]`; later tokens get the slots after it.
            uniform: (batch, most), float32, random numbers in [0, 1) that choose the tokens.
            count: () int32, the number of tokens to write, up to `most`.

        Returns:
            The state; the tokens, (batch, most) int32; and for each row, (batch,) int32, the index
            of the first token whose logits were not finite, or `most`.
        """
        slots = keras.tree.flatten(state)[0].shape[1]

        def body(index: Tensor, carried: Nest) -> tuple[Tensor, Nest]:
            state, token, written, end = carried
            place = rows["position"] + index
            state, logits = self._decoding.step(state, token, place, ops.mod(slot + index, slots))
            chances = ops.slice(uniform, (0, index), (uniform.shape[0], 1))[:, 0]
            token = self._choose(logits, chances, rows["rules"])
            written = ops.slice_update(written, (0, index), token[:, None])
            return index + 1, (state, token, written, move_end(end, index, logits))

        written = ops.zeros(uniform.shape, "int32")
        end = ops.full(uniform.shape[:1], uniform.shape[1], "int32")
        start = state, rows["token"], written, end
        _, (state, _, written, end) = ops.while_loop(
            lambda index, _: index < count, body, (ops.cast(0, "int32"), start)
        )
        return state, (written, end)


def is_one_of(token: Tensor, tokens: Sequence[int]) -> Tensor:
    """Returns, as (batch,) bool, whether each row's token, (batch,), is among `tokens`."""
    return ops.any(token[:, None] == np.array([*tokens, -1], np.int32), axis=-1)


def is_finite(logits: Tensor) -> Tensor:
    """Returns, as (batch,) bool, whether all logits of a row are finite."""
    return ops.all(ops.isfinite(logits), axis=-1)


def move_end(end: Tensor, place: Tensor, logits: Tensor) -> Tensor:
    """Returns, as (batch,) int32, the place of the first token with logits that are not finite.

    Args:
        end: the result for the earlier tokens; any place after all tokens if there was none.
        place: () int32, the place of the token that the logits predict.
        logits: (batch, vocabulary).
    """
    return ops.where(is_finite(logits), end, ops.minimum(end, place))
