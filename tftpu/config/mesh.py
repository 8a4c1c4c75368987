"""The text that describes a mesh, such as "data:2,fsdp:4"."""

import math
from collections.abc import Mapping

from tftpu.errors import UserError, counted, did_you_mean

DATA, FSDP, SEQUENCE, TENSOR = "data", "fsdp", "sequence", "tensor"
AXES = (DATA, FSDP, SEQUENCE, TENSOR)
BATCH_AXES = (DATA, FSDP)  # axes along which a global batch is sharded
AUTO = "auto"


def parse_mesh(mesh: str) -> dict[str, int]:
    """Returns the size of each axis that a mesh names; -1 means all remaining devices.

    Args:
        mesh: such as "fsdp:8" or "data:2,fsdp:-1".

    Raises:
        UserError: an axis is unknown or repeated, a size is invalid, or -1 is used twice.
    """
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, size = (text.strip() for text in part.partition(":"))
        if name not in AXES:
            raise UserError(
                f"The mesh {mesh!r} has an unknown axis {name!r}. The axes are {', '.join(AXES)}, "
                f"as in 'fsdp:8' or 'data:2,fsdp:4'.{did_you_mean(name, AXES)}"
            )
        if name in sizes:
            raise UserError(f"The mesh {mesh!r} names the axis {name!r} twice.")
        if not (size == "-1" or (size.isascii() and size.isdigit() and int(size) > 0)):
            raise UserError(
                f"The mesh {mesh!r} has the size {size!r} for {name!r}: give a positive whole "
                "number, or -1 for all remaining devices."
            )
        sizes[name] = int(size)
    if list(sizes.values()).count(-1) > 1:
        raise UserError(
            f"The mesh {mesh!r} has the size -1 several times: only one axis can take the rest."
        )
    return sizes


def count_batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which a mesh divides a global batch.

    Args:
        sizes: the sizes of the mesh's axes, by name; a missing axis has the size 1.
    """
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def check_between_slices(sizes: Mapping[str, int], slices: int) -> None:
    """Raises `UserError` if an axis other than `data` would cross the network between slices.

    Args:
        sizes: the size of every axis, by name.
        slices: the number of slices; each consists of consecutive devices.
    """
    if sizes[DATA] % slices:
        inside = [f"{name}:{size}" for name, size in sizes.items() if name != DATA and size > 1]
        inside[:1] = [f"{inside[0].partition(':')[0]}:-1"] if inside else []
        raise UserError(
            f"There are {slices} slices, but the mesh {mesh_text(dict(sizes))!r} shards the model "
            f"across the network between them: {DATA!r} must be a multiple of {slices}, as in "
            f"{','.join([f'{DATA}:{slices}', *inside])!r}."
        )


def mesh_text(sizes: dict[str, int]) -> str:
    """Returns a mesh in the form that `parse_mesh` reads, without axes of size 1."""
    axes = [f"{name}:{size}" for name, size in sizes.items() if size != 1]
    return ",".join(axes) or f"{DATA}:1"


def list_finer_meshes(sizes: Mapping[str, int], slices: int = 1) -> list[dict[str, int]]:
    """Returns the meshes that move devices from `data` to `fsdp`, sorted by the size of `fsdp`.

    Args:
        sizes: the size of every axis, by name.
        slices: the number of slices; `data` stays a multiple of it.
    """
    free = sizes[DATA] // slices
    return [
        {**sizes, DATA: sizes[DATA] // parts, FSDP: sizes[FSDP] * parts}
        for parts in range(2, free + 1)
        if free % parts == 0
    ]


def list_meshes(devices: int, slices: int = 1, most_tensor: int = 1) -> list[str]:
    """Returns the meshes over `data`, `fsdp` and `tensor` that use every device once.

    Args:
        devices: number of devices.
        slices: number of slices; `data` is a multiple of it.
        most_tensor: largest size of `tensor`; only powers of 2 are used.
    """
    found, tensor = [], 1
    while tensor <= most_tensor and devices % (tensor * slices) == 0:
        widest = {**dict.fromkeys(AXES, 1), DATA: devices // tensor, TENSOR: tensor}
        found += [mesh_text(sizes) for sizes in (widest, *list_finer_meshes(widest, slices))]
        tensor *= 2
    return found


def mesh_sizes(mesh: str | None, devices: int) -> dict[str, int]:
    """Returns the size of every axis of a mesh.

    Args:
        mesh: as for `parse_mesh`; None puts all devices on `data`, each with the whole model.
        devices: number of devices.

    Raises:
        UserError: as for `parse_mesh`, or the sizes do not use every device exactly once.
    """
    every = dict.fromkeys(AXES, 1)
    if mesh is None:
        return {**every, DATA: devices}
    sizes = parse_mesh(mesh)
    known = math.prod(size for size in sizes.values() if size > 0)
    free = [name for name, size in sizes.items() if size == -1]
    if free and devices % known == 0:
        sizes[free[0]] = devices // known
    elif known != devices or free:
        raise UserError(
            f"The mesh {mesh!r} needs {'a multiple of ' if free else ''}"
            f"{counted(known, 'device')}, but there are {devices}: the product of its sizes must "
            "be that number. The size -1 takes all remaining devices, as in 'fsdp:-1'."
        )
    return {**every, **sizes}
