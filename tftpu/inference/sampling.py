"""Chooses the next token from logits."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor, ops

_LEAST = 1e-6  # a lower temperature would make logits infinite


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is drawn.

    Attributes:
        temperature: the number by which logits are divided; 0 takes the most likely token.
        top_k: the number of most likely tokens from which to draw; 0 draws from all.
        top_p: draws from the fewest tokens whose probabilities add up to at least this (Holtzman et
            al. 2019, https://arxiv.org/abs/1904.09751).
        tokens: the size of the vocabulary, if the embedding table has more rows; 0: all rows.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    tokens: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= _LEAST):
            raise UserError(
                f"temperature={self.temperature}: give 0 for the most likely token, or a number "
                f"of {_LEAST} or more."
            )
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: give a number of tokens, or 0 for all of them.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: give a probability above 0 and at most 1.")

    @property
    def choice(self) -> "Choice":
        """The way to choose tokens; rows with the same choice can share a batch."""
        if self.temperature == 0 or 1 in (self.top_k, self.tokens):
            return Choice("likeliest", 0, self.tokens)
        all_of_them = not self.top_k or (0 < self.tokens <= self.top_k)
        if all_of_them and self.top_p == 1:
            return Choice("all", 0, self.tokens)
        # Rounded up to a power of 16, so that few sizes are compiled.
        best = 0 if all_of_them else 1 << -(-(self.top_k - 1).bit_length() // 4) * 4
        return Choice("best", best, self.tokens)


class Choice(NamedTuple):
    """The compiled part of rules. The numbers of the rules are arguments, one for each row.

    Attributes:
        kind: "likeliest"; "all": drawn from all tokens; or "best": drawn from the best tokens.
        best: the number of tokens to sort, a power of 16; 0: all.
        tokens: see `Sampling`.
    """

    kind: str
    best: int
    tokens: int

    def choose(self, logits: Tensor, uniform: Tensor, rules: Nest) -> Tensor:
        """Returns a token for each row.

        Args:
            logits: (batch, vocabulary), float32.
            uniform: (batch,), float32, numbers from [0, 1) that decide.
            rules: the rules as `gather_rules` returns them, one for each row.

        Returns:
            (batch,), int32.
        """
        logits = logits[:, : self.tokens or None]
        if self.kind == "likeliest":
            return ops.cast(ops.argmax(logits, axis=-1), "int32")
        temperature = rules["temperature"][:, None]
        if self.kind == "all":
            return _draw_place(ops.softmax(logits / temperature, axis=-1), uniform)
        count = min(self.best or logits.shape[-1], logits.shape[-1])
        best, tokens = ops.top_k(logits, count)  # sorted, with the most likely token first
        allowed = ops.arange(count)[None] < rules["top_k"][:, None]
        chances = ops.softmax(ops.where(allowed, best / temperature, -np.inf), axis=-1)
        # A token is left out if the tokens before it are enough.
        before = ops.cumsum(chances, axis=-1) - chances
        kept = ops.where(before < rules["top_p"][:, None], chances, 0.0)
        place = _draw_place(kept, uniform)
        return ops.cast(ops.take_along_axis(tokens, place[:, None], axis=-1)[:, 0], "int32")


def gather_rules(samplings: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Returns the numbers of rules, (batch,) each."""
    endless = np.iinfo(np.int32).max
    return {
        "temperature": np.array([s.temperature for s in samplings], np.float32),
        "top_k": np.array([min(s.top_k or endless, endless) for s in samplings], np.int32),
        "top_p": np.array([s.top_p for s in samplings], np.float32),
    }


def _draw_place(chances: Tensor, uniform: Tensor) -> Tensor:
    """Returns the place in each row of probabilities on which a number of [0, 1) falls, int32."""
    total = ops.cumsum(chances, axis=-1)
    drawn = uniform[:, None] * total[:, -1:]
    place = ops.sum(ops.cast(total <= drawn, "int32"), axis=-1)
    return ops.minimum(place, chances.shape[-1] - 1)
