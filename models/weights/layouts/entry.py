"""The correspondence between a variable of the zoo and the arrays of another library."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """The arrays that hold a variable in a file of another library.

    Attributes:
        ours: the path of the variable.
        theirs: the names of the arrays, usually one.
        read: a function that maps these arrays to the value of the variable.
        write: a function that maps the value to these arrays; None if they cannot be computed.
    """

    ours: str
    theirs: tuple[str, ...]
    read: Callable[..., np.ndarray]
    write: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None


Layout = Iterator[Entry]


def map_same(ours: str, theirs: str) -> Entry:
    """Returns an entry for a variable that both libraries store alike."""
    return Entry(ours, (theirs,), lambda array: array, lambda value: (value,))


def map_transposed(ours: str, theirs: str, read_axes: tuple[int, ...]) -> Entry:
    """Returns an entry for a variable whose axes the other library stores in another order.

    Args:
        ours: the path of the variable.
        theirs: the name of the array.
        read_axes: the axes of the array, in the order of the variable's.
    """
    write_axes = tuple(int(axis) for axis in np.argsort(read_axes))
    return Entry(
        ours,
        (theirs,),
        lambda array: array.transpose(read_axes),
        lambda value: (value.transpose(write_axes),),
    )


def map_joined(ours: str, theirs: list[str], transpose: bool) -> Entry:
    """Returns an entry for matrices that the other library stores separately.

    Args:
        ours: the path of the variable, which holds them joined along the last axis.
        theirs: the names of the arrays.
        transpose: whether each array is (out, in) in the file.
    """

    def turn(array: np.ndarray) -> np.ndarray:
        return array.T if transpose else array

    return Entry(
        ours,
        tuple(theirs),
        lambda *arrays: np.concatenate([turn(array) for array in arrays], axis=-1),
        lambda value: tuple(turn(part) for part in np.split(value, len(theirs), axis=-1)),
    )
