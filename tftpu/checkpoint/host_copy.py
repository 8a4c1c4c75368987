"""A copy of a checkpoint's leaves in host memory."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tftpu.engines.engine import Leaf

_LARGE = 1 << 20  # bytes; larger leaves are copied by a thread pool


class HostCopy:
    """A reusable copy in host memory: allocating pages takes longer than copying."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "checkpoint-copy")
        self._reserved: Future[None] | None = None

    def reserve(self, leaves: Mapping[str, Sequence[Leaf]]) -> None:
        """Allocates memory for leaves in the background."""
        wanted = {
            (group, index): (leaf.shape, np.dtype(leaf.dtype))
            for group, members in leaves.items()
            for index, leaf in enumerate(members)
        }

        def allocate() -> None:
            for key, (shape, dtype) in wanted.items():
                self._arrays[key] = np.empty(shape, dtype)
                self._arrays[key].fill(0)  # the system hands out a page when it is first written

        if not self._arrays and self._reserved is None:
            self._reserved = self._threads.submit(allocate)

    def take(self, leaves: Mapping[str, Sequence[Leaf]]) -> dict[str, list[np.ndarray]]:
        """Copies the values of leaves, by group; the result is valid until the next call."""
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        copies: list[Future[None]] = []
        groups = {
            group: [self._copied(group, i, leaf.read(), copies) for i, leaf in enumerate(members)]
            for group, members in leaves.items()
        }
        for copy in copies:
            copy.result()
        return groups

    def _copied(
        self, group: str, index: int, value: np.ndarray, copies: list[Future[None]]
    ) -> np.ndarray:
        array = self._arrays.get((group, index))
        if array is None or (array.shape, array.dtype) != (value.shape, value.dtype):
            array = self._arrays[group, index] = np.empty(value.shape, value.dtype)
        if value.nbytes < _LARGE:
            np.copyto(array, value)
        else:
            copies.append(self._threads.submit(np.copyto, array, value))
        return array
