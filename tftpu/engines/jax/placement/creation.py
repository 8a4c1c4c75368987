"""Creates variables already sharded, so that no device has to hold the whole model.

Keras calls the current distribution to get the layout of each variable that it creates. Random
initial values come from `tftpu.engines.jax.placement.initial`, others from Keras's jitted
initializers. Either way, a device receives only its shard.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tftpu.config.mesh import TENSOR
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement.sharding import SMALLEST


@contextlib.contextmanager
def sharded_variables(mesh: Mesh) -> Iterator[None]:
    """Shards the variables that Keras creates inside the `with` block over the mesh."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(CreationDistribution(mesh))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


class CreationDistribution:
    """Provides the layouts of new variables, until `Layout` chooses those of the whole model.

    It has the methods that Keras calls on a `keras.distribution.Distribution`.

    Args:
        mesh: the devices.
    """

    batch_dim_name = None

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._axes = meshes.list_weight_axes(mesh) + ((TENSOR,) if mesh.shape[TENSOR] > 1 else ())
        self._parts = math.prod(mesh.shape[axis] for axis in self._axes)

    def get_variable_layout(self, variable: keras.Variable) -> NamedSharding:
        """Returns a sharding along the largest divisible dimension; small variables stay whole."""
        shape = tuple(variable.shape)
        free = [i for i, size in enumerate(shape) if size % self._parts == 0]
        if self._parts == 1 or not free or np.prod(shape) < SMALLEST:
            return NamedSharding(self._mesh, PartitionSpec())
        axes: list[Any] = [None] * len(shape)
        axes[max(free, key=lambda i: shape[i])] = self._axes
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def get_tensor_layout(self, path: str) -> None:
        """Returns None, because XLA chooses the shardings of tensors."""

    def get_data_layout(self, data_shape: Sequence[int]) -> keras.distribution.TensorLayout:
        """Returns the layout of data in Keras's own `fit` and `predict`: a copy on each device."""
        devices = [f"{device.platform}:{device.id}" for device in self._mesh.devices.flatten()]
        mesh = keras.distribution.DeviceMesh((len(devices),), ["devices"], devices)
        return keras.distribution.TensorLayout([None] * len(data_shape), mesh)
