"""Chooses the next token from logits."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor, ops

_LEAST = 1e-6  # a lower temperature would make logits infinite
_FEW = 256  # up to this top_k, only 256 tokens are sorted, much faster than the vocabulary


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is drawn.

    Attributes:
        temperature: the number by which logits are divided; 0 takes the most likely token.
        top_k: the number of most likely tokens from which to draw; 0 draws from all.
        top_p: the least total probability of the most likely tokens from which to draw (Holtzman et
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
    def has_full_sort(self) -> bool:
        """True if the rule sorts the whole vocabulary, which slows all rows of a batch."""
        if self.temperature == 0 or self.top_k == 1 or 0 < self.tokens <= _FEW:
            return False
        return self.top_k > _FEW or (not self.top_k and self.top_p < 1)


def choose(logits: Tensor, uniform: Tensor, rules: Nest, tokens: int = 0) -> Tensor:
    """Returns a token for each row, chosen by the rule of the row.

    One program serves all rules. A way to choose runs only if a row needs it: sorting the whole
    vocabulary of a large model can take longer than the model's pass over a token.

    Args:
        logits: (batch, vocabulary), float32.
        uniform: (batch,), float32, random numbers in [0, 1) that choose the tokens.
        rules: the rules as `gather_rules` returns them, one for each row.
        tokens: see `Sampling`.

    Returns:
        (batch,), int32.
    """
    logits = logits[:, : tokens or None]
    size = logits.shape[-1]
    likeliest = ops.cast(ops.argmax(logits, axis=-1), "int32")
    greedy = ops.logical_or(rules["temperature"] == 0, rules["top_k"] == 1)
    from_best = ops.logical_or(rules["top_k"] < size, rules["top_p"] < 1)
    from_few = ops.logical_and(from_best, rules["top_k"] <= _FEW)

    def draw_all() -> Tensor:
        return draw_from_all(logits, uniform, rules)

    def draw_few() -> Tensor:
        return _draw_from_best(logits, uniform, rules, min(_FEW, size))

    def draw_best() -> Tensor:
        return _draw_from_best(logits, uniform, rules, size)

    ways = [(ops.logical_not(from_best), draw_all)]
    if size <= _FEW:
        ways.append((from_best, draw_best))
    else:
        ways.append((from_few, draw_few))
        ways.append((ops.logical_and(from_best, ops.logical_not(from_few)), draw_best))
    chosen = likeliest
    for rows, draw in ways:
        chosen = _replace_rows(chosen, ops.logical_and(rows, ops.logical_not(greedy)), draw)
    return chosen


def draw_from_all(logits: Tensor, uniform: Tensor, rules: Nest) -> Tensor:
    """Draws a token for each row from the whole vocabulary; arguments as for `choose`."""
    temperature = ops.maximum(rules["temperature"], _LEAST)[:, None]
    return _draw_place(ops.softmax(logits / temperature, axis=-1), uniform)


def _replace_rows(chosen: Tensor, rows: Tensor, draw: Callable[[], Tensor]) -> Tensor:
    """Replaces the tokens of the selected rows by drawn ones; draws nothing if none is selected."""
    return ops.cond(ops.any(rows), lambda: ops.where(rows, draw(), chosen), lambda: chosen)


def _draw_from_best(logits: Tensor, uniform: Tensor, rules: Nest, count: int) -> Tensor:
    """Draws tokens from the `count` most likely ones, according to `top_k` and `top_p`."""
    best, tokens = ops.top_k(logits, count)  # sorted, with the most likely token first
    allowed = ops.arange(count)[None] < rules["top_k"][:, None]
    scaled = best / ops.maximum(rules["temperature"], _LEAST)[:, None]
    chances = ops.softmax(ops.where(allowed, scaled, -np.inf), axis=-1)
    # A token is left out if the probabilities before it already add up to top_p.
    before = ops.cumsum(chances, axis=-1) - chances
    kept = ops.where(before < rules["top_p"][:, None], chances, 0.0)
    place = _draw_place(kept, uniform)
    return ops.cast(ops.take_along_axis(tokens, place[:, None], axis=-1)[:, 0], "int32")


def gather_rules(samplings: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Returns rules as arrays by name, (batch,) each; a `top_k` of 0 becomes the largest int32."""
    endless = np.iinfo(np.int32).max
    # Devices round smaller numbers to 0, for which no token would be left.
    least = np.finfo(np.float32).tiny
    return {
        "temperature": np.array([s.temperature for s in samplings], np.float32),
        "top_k": np.array([min(s.top_k or endless, endless) for s in samplings], np.int32),
        "top_p": np.array([max(s.top_p, least) for s in samplings], np.float32),
    }


def _draw_place(chances: Tensor, uniform: Tensor) -> Tensor:
    """Draws an index, int32, from each row of probabilities; `uniform` in [0, 1) selects it."""
    total = ops.cumsum(chances, axis=-1)
    drawn = uniform[:, None] * total[:, -1:]
    place = ops.sum(ops.cast(total <= drawn, "int32"), axis=-1)
    return ops.minimum(place, chances.shape[-1] - 1)
