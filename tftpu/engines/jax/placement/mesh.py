"""The mesh: the devices with names for the axes that batches and weights are cut along."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tftpu.config import mesh as sizes_of
from tftpu.config.mesh import BATCH_AXES, FSDP, SEQUENCE, TENSOR
from tftpu.errors import UserError

Device = Any  # jax.Device, which type checkers see as a variable
WEIGHT_AXES = (FSDP, SEQUENCE)  # along which a weight is cut, where no rule says how


@dataclasses.dataclass(frozen=True)
class BatchShard:
    """The part of each global batch that a process feeds to its devices.

    Attributes:
        index: of the part; processes whose devices share the model may feed the same one.
        count: the number of parts, which are equal and consecutive.
    """

    index: int
    count: int


def make(sizes: dict[str, int], devices: Sequence[Device]) -> Mesh:
    """Returns a mesh of all devices, neighbours along the last axis next to each other.

    Args:
        sizes: of every axis, as `tftpu.config.mesh.mesh_sizes` returns them.
        devices: in JAX's order; those of a slice, and of a process, are put next to each other.

    Raises:
        UserError: an axis other than `data` crosses the network between slices.
    """
    sizes_of.check_between_slices(sizes, len({_find_slice(device) for device in devices}))
    return Mesh(np.asarray(sort_devices(devices)).reshape(tuple(sizes.values())), tuple(sizes))


def sort_devices(devices: Sequence[Device]) -> list[Device]:
    """Returns devices so that those of a slice, and there of a process, follow one another."""
    return sorted(devices, key=lambda device: (_find_slice(device), device.process_index))


def _find_slice(device: Device) -> int:
    """Returns the number of the TPU slice that a device belongs to, 0 if there is only one."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def find_batch_shard(mesh: Mesh, process: int) -> BatchShard:
    """Returns the part of each global batch that a process feeds.

    Args:
        mesh: of the devices of all processes, made by `make`.
        process: its number.

    Raises:
        UserError: the devices that share the model are of one process and a part of another.
    """
    shards = mesh.devices.reshape(count_batch_shards(mesh), -1)
    feeders = [{device.process_index for device in row} for row in shards]
    mine = [shard for shard, processes in enumerate(feeders) if process in processes]
    everywhere = [set(feeders[shard]) == set(feeders[mine[0]]) for shard in mine]
    if not all(everywhere) or mine[0] % len(mine) or len(feeders) % len(mine):
        each = mesh.devices.size // len({device.process_index for device in mesh.devices.flat})
        raise UserError(
            f"The mesh has {len(shards[0])} devices for each share of the batch, along "
            f"{SEQUENCE!r} and {TENSOR!r}, and each host has {each} device(s): one of the two "
            "numbers must divide the other."
        )
    return BatchShard(mine[0] // len(mine), len(feeders) // len(mine))


def list_batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of more than one device along which a batch is cut."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def list_weight_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of more than one device along which any weight may be cut."""
    return tuple(axis for axis in WEIGHT_AXES if mesh.shape[axis] > 1)


def count_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts that a global batch is cut into."""
    return sizes_of.count_batch_shards(mesh.shape)
