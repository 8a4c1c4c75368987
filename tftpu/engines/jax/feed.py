"""Batches of a data set on the devices of a mesh."""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import data
from tftpu.engines.batches import data_errors
from tftpu.engines.data import Epochs, Pipeline
from tftpu.engines.engine import Epoch
from tftpu.engines.jax import mesh as meshes
from tftpu.engines.jax.sharding import Layout
from tftpu.engines.losses import examples_of
from tftpu.tensors import Nest


def arrays_of(batches: tf.data.Dataset) -> Iterator[Nest]:
    """Yields the batches of a data set as NumPy arrays, prepared while the devices work."""
    with data_errors():
        yield from batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def training_batches(
    dataset: Any,
    start: int,
    shares: int,
    class_weight: dict[int, float] | None = None,
    epoch: Epoch | None = None,
) -> Iterator[Nest]:
    """Returns an endless iterator over global batches from step `start`.

    Args:
        dataset, start, class_weight: as for `tftpu.engines.data.for_training`.
        shares: number of shares that a batch is cut into.
        epoch: as for `tftpu.engines.engine.Engine.batches`.
    """
    if epoch is not None and (isinstance(dataset, Epochs) or not isinstance(dataset, Pipeline)):
        return arrays_of(data.for_epochs(dataset, start, epoch, shares, class_weight))
    return arrays_of(data.for_training(dataset, start, class_weight))


def placed(batch: Nest, layout: Layout) -> Nest:
    """Returns a batch on the devices, cut along its examples; whole on each if it cannot be cut.

    Args:
        batch: nested NumPy arrays.
        layout: where batches lie.
    """
    cut = examples_of(batch) % meshes.batch_shares(layout.mesh) == 0

    def place(array):
        array = np.asarray(array)
        return jax.device_put(array, layout.of_batch(array.ndim) if cut else layout.whole)

    return keras.tree.map_structure(place, batch)


def shapes_of(spec: Nest) -> Nest:
    """Returns `jax.ShapeDtypeStruct`s of nested `tf.TensorSpec`s."""
    return keras.tree.map_structure(
        lambda s: jax.ShapeDtypeStruct(tuple(s.shape), s.dtype.as_numpy_dtype), spec
    )
