"""The mesh: devices along named axes, along which batches and weights are sharded."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tftpu.config import mesh as sizes_of
from tftpu.config.mesh import BATCH_AXES, FSDP, SEQUENCE, TENSOR
from tftpu.errors import UserError, counted

Device = Any  # a jax.Device, which type checkers treat as a variable, not a type
WEIGHT_AXES = (FSDP, SEQUENCE)  # axes that shard a weight's largest dimension and need no rules


@dataclasses.dataclass(frozen=True)
class BatchShard:
    """The part of each global batch that a process feeds to its devices.

    Attributes:
        index: the index of the part. Several processes feed the same part if their devices
            compute the same examples.
        count: the number of parts, each with equally many, consecutive examples.
    """

    index: int
    count: int


def make(sizes: dict[str, int], devices: Sequence[Device]) -> Mesh:
    """Returns a mesh of all devices, in which neighbours along the last axis are closest.

    Args:
        sizes: the size of each axis by name, as `tftpu.config.mesh.mesh_sizes` returns them.
        devices: the devices in JAX's order; the mesh has them sorted by slice and process.

    Raises:
        UserError: an axis other than `data` crosses the network between slices.
    """
    sizes_of.check_between_slices(sizes, len({_find_slice(device) for device in devices}))
    return Mesh(np.asarray(sort_devices(devices)).reshape(tuple(sizes.values())), tuple(sizes))


def sort_devices(devices: Sequence[Device]) -> list[Device]:
    """Sorts devices by slice, and within a slice by process."""
    return sorted(devices, key=lambda device: (_find_slice(device), device.process_index))


def _find_slice(device: Device) -> int:
    """Returns the index of the TPU slice that a device belongs to, or 0 without several slices."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def find_batch_shard(mesh: Mesh, process: int) -> BatchShard:
    """Returns the part of each global batch that a process feeds.

    Args:
        mesh: the mesh of the devices of all processes, made by `make`.
        process: the index of the process.

    Raises:
        UserError: neither the number of devices per shard of a batch, nor the number of devices
            per process, divides the other.
    """
    shards = mesh.devices.reshape(count_batch_shards(mesh), -1)
    feeders = [{device.process_index for device in row} for row in shards]
    mine = [shard for shard, processes in enumerate(feeders) if process in processes]
    everywhere = [set(feeders[shard]) == set(feeders[mine[0]]) for shard in mine]
    if not all(everywhere) or mine[0] % len(mine) or len(feeders) % len(mine):
        each = mesh.devices.size // len({device.process_index for device in mesh.devices.flat})
        raise UserError(
            f"The mesh has {len(shards[0])} devices for each shard of the batch (along "
            f"{SEQUENCE!r} and {TENSOR!r}), and each host has {counted(each, 'device')}: one of "
            "the two numbers must divide the other."
        )
    return BatchShard(mine[0] // len(mine), len(feeders) // len(mine))


def list_batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of size 2 or more that shard a batch."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def list_weight_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of size 2 or more that may shard a weight without sharding rules."""
    return tuple(axis for axis in WEIGHT_AXES if mesh.shape[axis] > 1)


def count_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards that the mesh divides a global batch into."""
    return sizes_of.count_batch_shards(mesh.shape)
