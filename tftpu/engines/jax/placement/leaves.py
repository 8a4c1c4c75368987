"""Turns arrays on a mesh into checkpoint leaves, which save this process's shards."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from tftpu.engines.leaf import Leaf
from tftpu.storage import regions
from tftpu.storage.regions import Region


def from_variable(variable: keras.Variable) -> Leaf:
    """Returns the checkpoint leaf of a variable on a mesh."""
    return from_array(variable.path, lambda: variable.value, variable.assign)


def from_array(name: str, value: Callable[[], Any], assign: Callable[[Any], None]) -> Leaf:
    """Returns the checkpoint leaf of a value on a mesh; each step may set it to a new array.

    Args:
        name: the path of the variable.
        value: a function that returns the `jax.Array`, whose sharding must not change.
        assign: a function that sets the array.
    """
    array = value()
    shape, sharding, dtype = tuple(array.shape), array.sharding, np.dtype(array.dtype)
    # Keras's "int" is int32 under JAX, but checkpoints hold it as int64, as under TensorFlow.
    saved = "int64" if dtype == np.int32 else dtype.name

    def to_region(index: tuple[slice, ...]) -> Region:
        return regions.from_slices(index, shape)

    def read(region: Region) -> np.ndarray:
        found = next(s.data for s in value().addressable_shards if to_region(s.index) == region)
        return np.asarray(found).astype(saved, copy=False)

    def assign_parts(values: Mapping[Region, np.ndarray]) -> None:
        def select_part(index: tuple[slice, ...] | None) -> np.ndarray:
            region = regions.select_all(shape) if index is None else to_region(index)
            return values[region].astype(dtype, copy=False)

        assign(jax.make_array_from_callback(shape, sharding, select_part))

    held = [to_region(index) for index in sharding.addressable_devices_indices_map(shape).values()]
    written = [to_region(s.index) for s in array.addressable_shards if s.replica_id == 0]
    return Leaf(name, shape, saved, tuple(dict.fromkeys(held)), tuple(written), read, assign_parts)
