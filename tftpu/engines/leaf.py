"""Leaves: the variables of a run as checkpoints see them."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tftpu.storage import regions
from tftpu.storage.regions import Region


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One variable of a checkpoint: the regions of it that this process's devices hold.

    Attributes:
        name: path of the variable.
        shape: its global shape.
        dtype: name of its dtype, as NumPy knows it with `ml_dtypes`.
        held: the regions that the devices hold, each listed once; a restore must read them.
        written: the regions that this process writes; exactly one process writes each element.
        read: a function from a held region to its values in host memory, which may be a view that
            the next step overwrites.
        assign: a function that sets the value on all devices from arrays for all held regions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    held: tuple[Region, ...]
    written: tuple[Region, ...]
    read: Callable[[Region], np.ndarray]
    assign: Callable[[Mapping[Region, np.ndarray]], None]

    @classmethod
    def undivided(
        cls,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        read: Callable[[], np.ndarray],
        assign: Callable[[np.ndarray], None],
        writes: bool = True,
    ) -> "Leaf":
        """Returns the leaf of a variable that every device holds in full.

        Args:
            name, shape, dtype, assign: as for the class.
            read: a function that returns the value.
            writes: whether this process writes it.
        """
        region = regions.select_all(shape)

        def assign_whole(values: Mapping[Region, np.ndarray]) -> None:
            assign(values[region])

        written = (region,) if writes else ()
        return cls(name, shape, dtype, (region,), written, lambda _: read(), assign_whole)
