"""Joins the outputs of batches, and lets devices compute one batch ahead of the reader."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.tensors import Nest

_T = TypeVar("_T")


def iterate_ahead(computed: Iterable[_T]) -> Iterator[_T]:
    """Yields each item after requesting the next, so that the devices stay busy.

    Args:
        computed: an iterator that starts a computation on the devices for each item.
    """
    before: list[_T] = []
    for item in computed:
        yield from before
        before = [item]
    yield from before


def group_batches(batches: Iterable[_T], size: int) -> Iterator[tuple[int, list[_T]]]:
    """Yields groups of batches, each with the number of its first batch.

    Args:
        batches: the batches.
        size: the number of batches of a group; the last one may have fewer.
    """
    given = iter(batches)
    for first in itertools.count(0, size):
        group = list(itertools.islice(given, size))
        if not group:
            return
        yield first, group


def keep_examples(output: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns the rows of a batch's output without those of padding.

    Args:
        output: an output of the model, (batch, ...).
        valid: 1.0 for examples and 0.0 for padding, (batch,).

    Raises:
        UserError: the output does not have one row for each example.
    """
    if output.shape[:1] != valid.shape:
        raise UserError(
            f"An output of the model has the shape {output.shape} for a batch of "
            f"{len(valid)} examples, but predict needs one row for each example: reshape the "
            "output to (examples, ...), or leave it out of what the model returns."
        )
    return output[valid > 0]


def join_outputs(parts: Iterable[Nest]) -> Nest:
    """Joins the outputs of all batches into nested NumPy arrays, (examples, ...).

    Raises:
        UserError: there is no batch.
    """
    collected = list(parts)
    if not collected:
        raise UserError("The dataset is empty.")
    return keras.tree.map_structure(_join, *collected)


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tf.concat(parts, 0)  # the parts are ragged tensors
