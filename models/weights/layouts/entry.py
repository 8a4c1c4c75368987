"""One variable of ours and the arrays that another library keeps for it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """Where a variable lies in a file, and how it is read and written.

    Args:
        ours: the path of the variable.
        theirs: the names of the arrays that it is made of, most often one.
        read: these arrays -> the value of the variable.
        write: the value -> these arrays; None: it cannot be told from the value alone.
    """

    ours: str
    theirs: tuple[str, ...]
    read: Callable[..., np.ndarray]
    write: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None


Layout = Iterator[Entry]


def same(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), lambda array: array, lambda value: (value,))


def transposed(ours: str, theirs: str, read_axes: tuple[int, ...], write_axes=None) -> Entry:
    """With its axes in another order."""
    write_axes = write_axes or tuple(np.argsort(read_axes))
    return Entry(
        ours,
        (theirs,),
        lambda array: array.transpose(read_axes),
        lambda value: (value.transpose(write_axes),),
    )


def joined(ours: str, theirs: list[str], transpose: bool) -> Entry:
    """Several matrices of one input side by side, each (out, in) in the file if `transpose`."""

    def turned(array):
        return array.T if transpose else array

    return Entry(
        ours,
        tuple(theirs),
        lambda *arrays: np.concatenate([turned(array) for array in arrays], axis=-1),
        lambda value: tuple(turned(part) for part in np.split(value, len(theirs), axis=-1)),
    )
