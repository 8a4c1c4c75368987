"""Reads batches of a data set and places them on the devices of a mesh."""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import tensorflow as tf

from tftpu.engines.data import conversion
from tftpu.engines.data.batches import data_errors
from tftpu.engines.data.conversion import Epochs, Pipeline
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.tuning import limit_tuning
from tftpu.engines.engine import Epoch
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement import placing
from tftpu.engines.jax.placement.mesh import BatchShard
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.engines.objectives.losses import count_examples
from tftpu.tensors import Nest


def iterate_arrays(batches: tf.data.Dataset) -> Iterator[Nest]:
    """Yields the batches of a data set as NumPy arrays, and prefetches the next ones."""
    with data_errors():
        yield from limit_tuning(batches.prefetch(tf.data.AUTOTUNE)).as_numpy_iterator()


def iterate_training_batches(
    dataset: Any,
    start: int,
    part: BatchShard,
    class_weight: dict[int, float] | None = None,
    epoch: Epoch | None = None,
    gate: Gate | None = None,
) -> Iterator[Nest]:
    """Returns an endless iterator over the global batches from step `start`.

    A pipeline reads only the part that this process feeds; other data sets are read in full.

    Args:
        dataset, start, class_weight: as for `tftpu.engines.data.conversion.build_training`.
        part: the part of each batch that this process feeds.
        epoch, gate: as for `tftpu.engines.engine.Engine.batches`.
    """
    if isinstance(dataset, Pipeline) and not isinstance(dataset, Epochs):
        return iterate_arrays(
            conversion.build_training(dataset, start, class_weight, part.index, part.count)
        )
    return iterate_arrays(conversion.build_whole(dataset, start, epoch, class_weight, gate))


def place_shard(batch: Nest, layout: Layout, part: BatchShard) -> Nest:
    """Puts this process's part of a global batch on its devices; returns the global batch.

    Args:
        batch: this process's part as nested NumPy arrays, (examples, ...).
        layout: the shardings of batches.
        part: the position of this part in the global batch.
    """

    def place(array):
        sharding = layout.build_batch_sharding(array.ndim)
        if part.count == 1:
            return placing.place_value(array, sharding)
        shape = (part.count * len(array), *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return jax.tree.map(place, batch)


def place_batch(batch: Nest, layout: Layout, part: BatchShard) -> Nest:
    """Puts a batch on the devices: sharded by example if it is divisible, otherwise whole on each.

    Args:
        batch: the batch as nested NumPy arrays, the same on all hosts.
        layout: the shardings of batches.
        part: the part that this process feeds.
    """
    if count_examples(batch) % meshes.count_batch_shards(layout.mesh) == 0:
        return place_shard(slice_shard(batch, part), layout, part)
    return jax.tree.map(lambda array: placing.place_value(array, layout.whole), batch)


def slice_shard(batch: Nest, part: BatchShard) -> Nest:
    """Returns the examples of a global batch that a process feeds."""
    size = count_examples(batch) // part.count
    first = part.index * size
    return jax.tree.map(lambda array: array[first : first + size], batch)


def to_shapes(spec: Nest) -> Nest:
    """Returns `jax.ShapeDtypeStruct`s of nested `tf.TensorSpec`s."""
    return keras.tree.map_structure(
        lambda s: jax.ShapeDtypeStruct(tuple(s.shape), s.dtype.as_numpy_dtype), spec
    )
