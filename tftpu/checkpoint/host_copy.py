"""A copy of a checkpoint's leaves in host memory."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tftpu.engines.leaf import Leaf
from tftpu.storage import regions
from tftpu.storage.regions import Region

_LARGE = 1 << 20  # bytes; a thread pool copies larger arrays
_Key = tuple[str, int, Region]


class Copied(NamedTuple):
    """The copy of one region of a leaf; a leaf is a variable of the run.

    Attributes:
        number: the index of the leaf in its group.
        leaf: the leaf.
        region: a region that this process writes.
        array: the copied values.
    """

    number: int
    leaf: Leaf
    region: Region
    array: np.ndarray


class HostCopy:
    """Host memory that each checkpoint reuses: allocating pages takes longer than copying."""

    def __init__(self) -> None:
        self._arrays: dict[_Key, np.ndarray] = {}
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "checkpoint-copy")
        self._reserved: Future[None] | None = None

    def reserve(self, leaves: Mapping[str, Sequence[Leaf]]) -> None:
        """Allocates memory in the background for the regions that this process writes."""
        wanted = {
            (group, index, region): (regions.compute_shape(region), np.dtype(leaf.dtype))
            for group, members in leaves.items()
            for index, leaf in enumerate(members)
            for region in leaf.written
        }

        def allocate() -> None:
            for key, (shape, dtype) in wanted.items():
                self._arrays[key] = np.empty(shape, dtype)
                # The system allocates a page of memory only when it is first written.
                self._arrays[key].fill(0)

        if not self._arrays and self._reserved is None:
            self._reserved = self._threads.submit(allocate)

    def take(self, leaves: Mapping[str, Sequence[Leaf]]) -> dict[str, list[Copied]]:
        """Returns copies of this process's regions, by group, until the next call replaces them."""
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        copies: list[Future[None]] = []
        groups = {
            group: [
                Copied(i, leaf, r, self._copy_array((group, i, r), leaf.read(r), copies))
                for i, leaf in enumerate(members)
                for r in leaf.written
            ]
            for group, members in leaves.items()
        }
        for copy in copies:
            copy.result()
        return groups

    def _copy_array(self, key: _Key, value: np.ndarray, copies: list[Future[None]]) -> np.ndarray:
        array = self._arrays.get(key)
        if array is None or (array.shape, array.dtype) != (value.shape, value.dtype):
            array = self._arrays[key] = np.empty(value.shape, value.dtype)
        if value.nbytes < _LARGE:
            np.copyto(array, value)
        else:
            copies.append(self._threads.submit(np.copyto, array, value))
        return array
