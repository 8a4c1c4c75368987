"""Frozen weights that checkpoints leave out, such as the base of adapters, and their digest."""

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

_MODEL = "model"  # the group that holds the model's variables
_PIECE = 1 << 22  # number of elements that the digest sums at a time
_SLOPE, _OFFSET = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


class Base:
    """The weights of a model that checkpoints leave out.

    Whoever builds the model must set them again, and a digest shows whether they are the same. The
    digest is a sum over the elements, each weighted by its position, so it does not depend on how
    devices and hosts shard a variable.

    Args:
        paths: the paths of the variables.
        state: function that returns all variables of the run, by group.
        hosts: the hosts that train together.

    Raises:
        UserError: `paths` is a single string.
    """

    def __init__(
        self, paths: Collection[str], state: Callable[[], dict[str, list[Leaf]]], hosts: Hosts
    ):
        if isinstance(paths, str):
            raise UserError(f"base={paths!r} is a string: give a collection of paths, [{paths!r}].")
        self._paths = frozenset(paths)
        self._state = state
        self._hosts = hosts

    def begin(self, model: Any) -> None:
        """Checks the paths, and computes the digest, so that no save must wait for it.

        Args:
            model: the model to train, a `keras.Model` with the weights that the run begins with.

        Raises:
            UserError: a path does not belong to a frozen weight.
        """
        frozen = {v.path for v in model.weights} - {v.path for v in model.trainable_variables}
        unfit = sorted(self._paths - frozen)
        if unfit:
            raise UserError(
                f"base has {', '.join(map(repr, unfit[:3]))}, but checkpoints can leave out only "
                "the model's frozen weights: give what tftpu.models.base_of(model) returns."
            )
        _ = self.digest

    def list_saved(self) -> dict[str, list[Leaf]]:
        """Returns all variables that a checkpoint saves, by group."""
        leaves = self._state()
        return leaves | {_MODEL: [v for v in leaves[_MODEL] if v.name not in self._paths]}

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the weights not in checkpoints, the same on all hosts; "" if none."""
        if not self._paths:
            return ""
        exchange = self._hosts.exchange
        own = [v for v in self._state()[_MODEL] if v.name in self._paths]
        total = sum(_sum(leaf, leaf.held if exchange is None else leaf.written) for leaf in own)
        if exchange is not None:
            parts = exchange.collect("base", str(total))
            total = int(exchange.announce("base", str(sum(map(int, parts)))))
        return f"{total % (1 << 64):016x}"

    def check_given(self, state: Mapping[str, Any], workdir: str) -> None:
        """Raises `UserError` if only the checkpoint or only this run leaves weights out.

        Args:
            state: the state of the checkpoint, as JSON.
            workdir: the workdir of the run.
        """
        left_out = bool(state.get("base", ""))
        if left_out == bool(self._paths):
            return
        if left_out:
            raise UserError(
                f"The checkpoints in {workdir!r} hold the adapters without the frozen weights, "
                "but base= is missing or empty: adapt the model as before, by "
                "tftpu.models.enable_lora(model, rank), and write "
                f"tftpu.Trainer(model, {workdir!r}, base=tftpu.models.base_of(model))."
            )
        raise UserError(
            f"The checkpoints in {workdir!r} hold all weights, because the run began without "
            f"base=: leave it out, tftpu.Trainer(model, {workdir!r}), or choose another workdir."
        )

    def check(self, state: Mapping[str, Any], workdir: str | None) -> None:
        """Raises `UserError` if a checkpoint was saved with other frozen weights.

        Args:
            state: the state of the checkpoint, as JSON.
            workdir: the workdir of the run.
        """
        saved = state.get("base", "")
        found = self.digest
        if saved == found:
            return
        del self.digest  # computed again, as the user may load the right weights
        raise UserError(
            f"The adapters in {workdir!r} were trained with weights whose digest is {saved}, but "
            f"the digest of the model's weights is {found}. Load the weights that the adapters "
            "were trained with: use model.init_from, or model.preset for KerasHub, or load "
            "them where the model is built."
        )


def _sum(leaf: Leaf, parts: Sequence[Region]) -> int:
    """Returns a variable's term of the digest: the weighted sum of its elements in the regions."""
    total = np.uint64(0)
    for region in parts:
        bits = _view_bits(np.asarray(leaf.read(region)))
        for first, places in _iterate_places(leaf.shape, region):
            words = bits[first : first + len(places)].astype(np.uint64)
            with np.errstate(over="ignore"):
                total += (words * (places * _SLOPE + _OFFSET)).sum(dtype=np.uint64)
    return int(total) * (2 * zlib.crc32(leaf.name.encode()) + 1)


def _view_bits(values: np.ndarray) -> np.ndarray:
    """Returns the bits of the elements as unsigned integers of the same width, (size,)."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"uint{8 * flat.dtype.itemsize}")


def _iterate_places(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, Any]]:
    """Yields groups of elements: (first index in the flat region, indices in the flat variable)."""
    count = regions.count_elements(region)
    if region == regions.select_all(shape):
        for first in range(0, count, _PIECE):
            yield first, np.arange(first, min(first + _PIECE, count), dtype=np.uint64)
        return
    # A row is contiguous: find where each row begins, and then the places of its elements.
    starts = np.zeros(1, np.uint64)
    for size, (low, high) in zip(shape[:-1], region[:-1]):
        inside = np.arange(low, high, dtype=np.uint64)
        starts = (starts[:, None] * np.uint64(size) + inside).reshape(-1)
    low, high = region[-1]
    row = np.arange(low, high, dtype=np.uint64)
    rows = max(1, _PIECE // max(1, len(row)))
    for first in range(0, len(starts), rows):
        places = starts[first : first + rows, None] * np.uint64(shape[-1]) + row
        yield first * len(row), places.reshape(-1)
