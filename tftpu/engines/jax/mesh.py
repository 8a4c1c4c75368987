"""The mesh: the devices with names for the axes that batches and weights are cut along."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tftpu.config.mesh import DATA, FSDP, SEQUENCE

Device = Any  # jax.Device, which type checkers see as a variable
BATCH_AXES = (DATA, FSDP)  # along which a global batch is cut
WEIGHT_AXES = (FSDP, SEQUENCE)  # along which a weight is cut, where no rule says how


def make(sizes: dict[str, int], devices: Sequence[Device]) -> Mesh:
    """Returns a mesh of all devices, neighbours along the last axis next to each other.

    Args:
        sizes: of every axis, as `tftpu.config.mesh.mesh_sizes` returns them.
        devices: in JAX's order.
    """
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of more than one device along which a batch is cut."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def weight_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of more than one device along which any weight may be cut."""
    return tuple(axis for axis in WEIGHT_AXES if mesh.shape[axis] > 1)


def batch_shares(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts that a global batch is cut into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
