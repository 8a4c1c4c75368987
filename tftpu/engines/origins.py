"""Counts how often a step computes a matrix product, in its forward pass and for gradients."""

import enum
import functools
import operator
from collections.abc import Iterable, Sequence


class Origin(enum.Flag):
    """The kinds of inputs that a value is computed from; `NONE` means from constants alone."""

    NONE = 0
    DATA = enum.auto()
    FIXED = enum.auto()  # variables that are never trained
    TRAINED = enum.auto()


def merge_origins(origins: Iterable[Origin]) -> Origin:
    """Returns the origin of a value computed from values with these origins."""
    return functools.reduce(operator.or_, origins, Origin.NONE)


def stopped(origin: Origin) -> Origin:
    """Returns the origin of a value after `stop_gradient`, which makes its variables fixed."""
    held = origin & ~Origin.TRAINED
    return held | Origin.FIXED if Origin.TRAINED in origin else held


def count_passes(left: Origin, right: Origin, *, batched: bool = False) -> int:
    """Returns how often a step computes a product of this size for one forward product.

    The gradient of one operand is a product with the other operand. It is needed if the operand
    depends on a trained variable. Data count as if trained if the other operand is, which gives
    6 x parameters x tokens for a fully trained transformer (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361). A frozen layer without a trained layer before it counts once.
    A product with constants, such as an interpolation, does not count, nor does a batched product
    of activations with activations, as in attention. Batched products with weights, as of experts,
    do.

    Args:
        left, right: the origins of the operands.
        batched: whether an axis is common to both operands and the product.
    """

    if not left or not right or (batched and Origin.DATA in left & right):
        return 0

    def needed(own: Origin, other: Origin) -> bool:
        return Origin.TRAINED in own or (own is Origin.DATA and Origin.TRAINED in other)

    return 1 + needed(left, right) + needed(right, left)


def find_argument_origins(given: Sequence[Origin], count: int) -> list[Origin]:
    """Returns the origins of a called function's inputs.

    Args:
        given: the origins of the inputs of the call; an additional first one selects a branch.
        count: the number of inputs of the function. If the call has another number of inputs, each
            input of the function may be computed from all of them.
    """
    if len(given) in (count, count + 1):
        return list(given[len(given) - count :])
    return [merge_origins(given)] * count
