"""Frozen weights that checkpoints leave out, such as those below adapters, and their digest."""

import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tftpu.engines.engine import Hosts
from tftpu.engines.leaf import Leaf
from tftpu.errors import UserError
from tftpu.storage import regions
from tftpu.storage.regions import Region

_MODEL = "model"  # the group of its variables
_PIECE = 1 << 22  # elements that are summed at once
_SLOPE, _OFFSET = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


class Base:
    """The weights of a model that checkpoints leave out.

    Who builds the model gives them their values again, and a digest tells whether they are the
    same. It is a sum over the elements, each weighted by its place, so that it does not depend on
    how devices and hosts divide a variable.

    Args:
        paths: of the variables.
        state: returns all variables of the run, by group.
        hosts: that train together.
    """

    def __init__(
        self, paths: Collection[str], state: Callable[[], dict[str, list[Leaf]]], hosts: Hosts
    ):
        self._paths = frozenset(paths)
        self._state = state
        self._hosts = hosts

    def saved(self) -> dict[str, list[Leaf]]:
        """Returns what a checkpoint holds, by group: everything else."""
        leaves = self._state()
        return leaves | {_MODEL: [v for v in leaves[_MODEL] if v.name not in self._paths]}

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the values, on all hosts the same; "" if checkpoints leave nothing out."""
        if not self._paths:
            return ""
        exchange = self._hosts.exchange
        own = [v for v in self._state()[_MODEL] if v.name in self._paths]
        total = sum(_sum(leaf, leaf.held if exchange is None else leaf.written) for leaf in own)
        if exchange is not None:
            parts = exchange.collect("base", str(total))
            total = int(exchange.announce("base", str(sum(map(int, parts)))))
        return f"{total % (1 << 64):016x}"

    def check(self, state: Mapping[str, Any], workdir: str | None) -> None:
        """Raises `UserError` if a checkpoint was saved above other weights.

        Args:
            state: of the checkpoint, as JSON.
            workdir: of the run.
        """
        saved = state.get("base", "")
        if saved == self.digest:
            return
        if not saved or not self.digest:
            held, trained = (
                ("adapters alone", "all weights") if saved else ("all weights", "adapters")
            )
            raise UserError(
                f"The checkpoints in {workdir!r} hold {held}, and this run would save {trained}: "
                "use another workdir, or the model as it was."
            )
        raise UserError(
            f"The adapters in {workdir!r} were trained above other weights (digest {saved}) than "
            f"those that the model has now ({self.digest}): give the weights that they were "
            "trained with, by model.init_from or in your build()."
        )


def _sum(leaf: Leaf, parts: Sequence[Region]) -> int:
    """Returns the weighted sum of the elements of a variable in some regions."""
    total = np.uint64(0)
    for region in parts:
        bits = _bits(np.asarray(leaf.read(region)))
        for first, places in _places(leaf.shape, region):
            words = bits[first : first + len(places)].astype(np.uint64)
            with np.errstate(over="ignore"):
                total += (words * (places * _SLOPE + _OFFSET)).sum(dtype=np.uint64)
    return int(total) * (2 * zlib.crc32(leaf.name.encode()) + 1)


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns the elements as unsigned integers of their size, (size,)."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"uint{8 * flat.dtype.itemsize}")


def _places(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, Any]]:
    """Yields the places that a region's elements have in the variable, some at a time."""
    count = regions.size_of(region)
    starts = np.array([first for first, _ in region], np.int64)
    for first in range(0, count, _PIECE):
        inside = np.arange(first, min(first + _PIECE, count))
        if region == regions.whole(shape):
            yield first, inside.astype(np.uint64)
            continue
        indices = np.stack(np.unravel_index(inside, regions.shape_of(region)))
        places = np.ravel_multi_index(tuple(indices + starts[:, None]), shape)
        yield first, places.astype(np.uint64)
