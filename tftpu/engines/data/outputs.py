"""The outputs of many batches: computed one ahead of the reader, joined."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.tensors import Nest

_T = TypeVar("_T")


def iterate_ahead(computed: Iterable[_T]) -> Iterator[_T]:
    """Yields each item after the next one was asked for, which the devices may then be busy with.

    Args:
        computed: yields what a device was told to compute.
    """
    before: list[_T] = []
    for item in computed:
        yield from before
        before = [item]
    yield from before


def join_outputs(parts: Iterable[Nest]) -> Nest:
    """Returns the outputs of all batches as one, nested NumPy arrays of shape (examples, ...).

    Raises:
        UserError: there is no batch.
    """
    collected = list(parts)
    if not collected:
        raise UserError("The dataset is empty.")
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *collected)
