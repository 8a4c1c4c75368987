"""How often a step computes a product: once forward, and once for each gradient that it needs."""

import enum
import functools
import operator
from collections.abc import Iterable, Sequence


class Origin(enum.Flag):
    """The kinds of values that a value is computed from; `NONE`: from constants alone."""

    NONE = 0
    DATA = enum.auto()
    FIXED = enum.auto()  # variables that are not trained
    TRAINED = enum.auto()


def merge_origins(origins: Iterable[Origin]) -> Origin:
    """Returns the origin of what is computed from values of these origins."""
    return functools.reduce(operator.or_, origins, Origin.NONE)


def stopped(origin: Origin) -> Origin:
    """Returns the origin of a value through which no gradient flows."""
    held = origin & ~Origin.TRAINED
    return held | Origin.FIXED if Origin.TRAINED in origin else held


def count_passes(left: Origin, right: Origin) -> int:
    """Returns how many products of the same size a product is in a step.

    The gradient of one operand is a product with the other one. It is needed where a variable that
    is trained lies behind the operand; data count as if one did, which makes it 6 x parameters x
    tokens for a transformer that is trained whole (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361). A layer that is not trained, and follows none that is, counts
    once; a product with constants, such as an interpolation, not at all.

    Args:
        left, right: origins of the operands.
    """

    if not left or not right:
        return 0

    def needed(own: Origin, other: Origin) -> bool:
        return Origin.TRAINED in own or (own is Origin.DATA and Origin.TRAINED in other)

    return 1 + needed(left, right) + needed(right, left)


def find_argument_origins(given: Sequence[Origin], count: int) -> list[Origin]:
    """Returns the origins of a called function's inputs.

    Args:
        given: those of the inputs of the call; the first may choose between functions.
        count: number of inputs of the function. If it is another number, each input may be
            computed from all that is given.
    """
    if len(given) in (count, count + 1):
        return list(given[len(given) - count :])
    return [merge_origins(given)] * count
