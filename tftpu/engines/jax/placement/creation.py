"""The creation of variables: cut over the devices that share a model, so that none holds it whole.

Keras asks its distribution where a variable belongs while it makes it. Random initial values come
from `initial`, others from Keras's jitted initializers; either way a device gets its part alone.
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
    """Cuts every variable that is made while the block runs."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(CreationDistribution(mesh))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


class CreationDistribution:
    """Says where variables belong until a run knows the layout of its whole model.

    It has what Keras asks a distribution for.

    Args:
        mesh: the devices.
    """

    batch_dim_name = None

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._axes = meshes.list_weight_axes(mesh) + ((TENSOR,) if mesh.shape[TENSOR] > 1 else ())
        self._parts = math.prod(mesh.shape[axis] for axis in self._axes)

    def get_variable_layout(self, variable: keras.Variable) -> NamedSharding:
        """Returns a layout that cuts the largest dimension which divides, if there is one."""
        shape = tuple(variable.shape)
        free = [i for i, size in enumerate(shape) if size % self._parts == 0]
        if self._parts == 1 or not free or np.prod(shape) < SMALLEST:
            return NamedSharding(self._mesh, PartitionSpec())
        axes: list[Any] = [None] * len(shape)
        axes[max(free, key=lambda i: shape[i])] = self._axes
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def get_tensor_layout(self, path: str) -> None:
        """Returns None: XLA divides the tensors of a step."""

    def get_data_layout(self, data_shape: Sequence[int]) -> keras.distribution.TensorLayout:
        """Returns the layout of what Keras's own `fit` and `predict` are given: whole."""
        devices = [f"{device.platform}:{device.id}" for device in self._mesh.devices.flatten()]
        mesh = keras.distribution.DeviceMesh((len(devices),), ["devices"], devices)
        return keras.distribution.TensorLayout([None] * len(data_shape), mesh)
