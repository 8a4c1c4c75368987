"""The loop that writes tokens, in functions that can be compiled."""

from collections.abc import Callable, Sequence

import numpy as np

from tftpu.inference.decoding import Decoding
from tftpu.tensors import Nest, Tensor, ops

Choose = Callable[[Tensor, Tensor, Nest], Tensor]


class Loop:
    """Reads prompts, and writes the tokens that follow them.

    Args:
        decoding: the passes of the model.
        choose: returns a token for each row, given logits, numbers of [0, 1) and rules; see
            `sampling.choose`.
        stops: tokens after which a row ends.
    """

    def __init__(self, decoding: Decoding, choose: Choose, stops: Sequence[int] = ()):
        self._decoding = decoding
        self._choose = choose
        self._stops = stops

    def read(
        self,
        tokens: Tensor,
        lengths: Tensor,
        uniform: Tensor,
        rules: Nest,
        ended: Tensor,
        slots: int,
    ) -> Nest:
        """Reads prompts, and returns the state of the loop.

        Args:
            tokens: (batch, time), int32, padded at the end.
            lengths: (batch,), int32, the length of each prompt.
            uniform: (batch,), float32, numbers of [0, 1) that decide on the first token.
            rules: the rules of the rows, as for `choose`.
            ended: (batch,), bool: rows for which nothing is written.
            slots: the number of tokens for which a row has room.
        """
        decoded, logits = self._decoding.read(tokens, lengths, slots)
        return {
            "decoded": decoded,
            "token": self._choose(logits, uniform, rules),
            "rules": rules,
            "first": ops.cast(tokens.shape[1], "int32"),  # the slot of the first written token
            "count": ops.cast(0, "int32"),  # the number of written tokens
            "ended": ended,
            "finite": is_finite(logits),
        }

    def write(
        self, state: Nest, lengths: Tensor, uniform: Tensor, every: int
    ) -> tuple[Nest, Tensor]:
        """Writes tokens, until all rows have ended.

        Args:
            state: the state of the loop.
            lengths: (batch,), int32, the length of each prompt.
            uniform: (batch, every), float32, numbers of [0, 1) that decide on the following tokens.
            every: the number of tokens to write.

        Returns:
            The state, and the tokens, (batch, every) int32, 0 after the end of all rows.
        """

        def body(index: Tensor, state: Nest, written: Tensor) -> tuple[Tensor, Nest, Tensor]:
            token, first, count = state["token"], state["first"], state["count"]
            written = ops.slice_update(written, (0, index), token[:, None])
            decoded, logits = self._decoding.step(state["decoded"], token, lengths, first, count)
            chances = ops.slice(uniform, (0, index), (uniform.shape[0], 1))[:, 0]
            state = {
                "decoded": decoded,
                "token": self._choose(logits, chances, state["rules"]),
                "rules": state["rules"],
                "first": first,
                "count": count + 1,
                "ended": ops.logical_or(state["ended"], is_one_of(token, self._stops)),
                "finite": ops.logical_and(state["finite"], is_finite(logits)),
            }
            return index + 1, state, written

        def unfinished(index: Tensor, state: Nest, written: Tensor) -> Tensor:
            if not self._stops:
                return index < every
            return ops.logical_and(index < every, ops.logical_not(ops.all(state["ended"])))

        start = ops.cast(0, "int32"), state, ops.zeros((uniform.shape[0], every), "int32")
        _, state, written = ops.while_loop(unfinished, body, start)
        return state, written


def is_one_of(token: Tensor, tokens: Sequence[int]) -> Tensor:
    """Returns whether the token of a row, (batch,), is one of some tokens, (batch,) bool."""
    return ops.any(token[:, None] == np.array([*tokens, -1], np.int32), axis=-1)


def is_finite(logits: Tensor) -> Tensor:
    """Returns whether all logits are finite, () bool."""
    return ops.all(ops.isfinite(logits))
