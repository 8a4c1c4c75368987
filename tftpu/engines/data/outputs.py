"""Joins the outputs of many batches, which are computed one batch ahead of the reader."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import keras
import numpy as np

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


def join_outputs(parts: Iterable[Nest]) -> Nest:
    """Joins the outputs of all batches into nested NumPy arrays, (examples, ...).

    Raises:
        UserError: there is no batch.
    """
    collected = list(parts)
    if not collected:
        raise UserError("The dataset is empty.")
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *collected)
