"""Texts to write, each a row of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

from tftpu.inference.sampling import Sampling

Tokens = list[int]


class Row(NamedTuple):
    """A text to write.

    Attributes:
        prompt: the tokens of the prompt.
        length: the most tokens to write.
        sampling: the rule by which tokens are drawn.
        seed, place: two integers that seed the random numbers with which tokens are chosen.
    """

    prompt: Sequence[int]
    length: int
    sampling: Sampling
    seed: int = 0
    place: int = 0


def build_rows(
    prompts: Sequence[Sequence[int]], length: int, sampling: Sampling, seed: int = 0
) -> list[Row]:
    """Returns a row for each prompt, in order; its place is its index."""
    return [Row(p, length, sampling, seed, n) for n, p in enumerate(prompts)]


def find_tokens(rows: Sequence[Row]) -> int:
    """Returns the vocabulary size that all rows share; raises `ValueError` if they differ."""
    found, *others = {row.sampling.tokens for row in rows}
    if others:
        raise ValueError(f"All rows must have one vocabulary, but these have {[found, *others]}.")
    return found
