"""Regions: the rectangular shards of an array, and their names in a checkpoint's files.

In a file, the array "00007 path" is a whole variable, and the array
"00007 path [0:128, 0:64] of [256, 64]" is one of its shards.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# For each dimension of the array: the first index, and the index after the last.
Region = tuple[tuple[int, int], ...]


def select_all(shape: Sequence[int]) -> Region:
    """Returns the region of all elements of an array of this shape."""
    return tuple((0, size) for size in shape)


def from_slices(slices: Sequence[slice], shape: Sequence[int]) -> Region:
    """Returns the region that slices with a step of 1 select from an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def to_slices(region: Region, origin: Region | None = None) -> tuple[slice, ...]:
    """Returns the slices that select a region from an array, or from its region `origin`."""
    starts = [first for first, _ in origin or ((0, 0),) * len(region)]
    return tuple(slice(first - s, last - s) for (first, last), s in zip(region, starts))


def compute_shape(region: Region) -> tuple[int, ...]:
    """Returns the shape of a region."""
    return tuple(last - first for first, last in region)


def count_elements(region: Region) -> int:
    """Returns the number of elements of a region."""
    return math.prod(compute_shape(region))


def intersect(one: Region, other: Region) -> Region | None:
    """Returns the intersection of two regions, or None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(first < last for first, last in found) else None


def fill(parts: Sequence[Region], shape: Sequence[int]) -> bool:
    """Returns whether regions of an array cover each of its elements exactly once."""
    if sum(map(count_elements, parts)) != math.prod(shape):
        return False
    if len(parts) == 1:
        return True
    bounds = np.array(parts)  # (parts, dimensions, 2)
    first, last = bounds[..., 0], bounds[..., 1]
    meet = (np.maximum(first[:, None], first) < np.minimum(last[:, None], last)).all(-1)
    return int(meet.sum()) == len(parts)  # each part overlaps with itself only


class Named(NamedTuple):
    """The parsed name of an array in a checkpoint's file.

    Attributes:
        number: the index of the variable in its group of the state, such as "optimizer".
        path: the path of the variable.
        region: the region of the variable that the array holds.
        shape: the shape of the variable.
    """

    number: int
    path: str
    region: Region
    shape: tuple[int, ...]


def format_name(part: Named) -> str:
    """Returns the name of an array in a checkpoint's file."""
    # The number comes first, because Keras numbers automatic names ("dense_7") within a process.
    name = f"{part.number:05d} {part.path}"
    if part.region == select_all(part.shape):
        return name
    ranges = ", ".join(f"{first}:{last}" for first, last in part.region)
    return f"{name} [{ranges}] of {list(part.shape)}"


def parse_name(name: str, shape: tuple[int, ...]) -> Named:
    """Parses the name of an array in a checkpoint's file.

    Args:
        name: the name of the array.
        shape: the shape of the array.

    Raises:
        ValueError: the name is not one of a checkpoint, or does not fit the shape.
    """
    found = re.fullmatch(r"(\d+) (.*?)(?: \[([\d:, ]+)\] of \[([\d, ]+)\])?", name, re.DOTALL)
    if not found:
        raise ValueError(f"{name!r} is not the name of a variable of a checkpoint")
    region = all_of = select_all(shape)
    if found[3]:
        ranges = [part.split(":") for part in found[3].split(", ")]
        region = tuple((int(first), int(last)) for first, last in ranges)
        all_of = select_all([int(size) for size in found[4].split(", ")])
        if len(region) != len(all_of) or intersect(region, all_of) != region:
            raise ValueError(f"{name!r} names a region outside the variable")
        if compute_shape(region) != shape:
            raise ValueError(f"{name!r} has the shape {shape}, not that of its region")
    return Named(int(found[1]), found[2], region, compute_shape(all_of))
