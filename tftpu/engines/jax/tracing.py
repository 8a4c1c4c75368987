"""Contexts in which models are built, and programs for a mesh are traced."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tftpu import sharding
from tftpu.config.mesh import SEQUENCE, TENSOR
from tftpu.engines import keras_internals
from tftpu.engines.jax import internals
from tftpu.engines.jax.convolution import convolve
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.kernels.dispatch import attending_by_kernel
from tftpu.sharding import CHANNELS, EXAMPLES, HEADS, TIME, TOKENS, Ring, Sharding


@contextlib.contextmanager
def tracing_for(platform: str, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Enters the context in which a program is traced, which includes `building_for`.

    Errors inside a layer stay unchanged: Keras would fail to add the layer's arguments to them.
    """
    internals.convolve_by(convolve)
    with building_for(platform, mesh), keras_internals.plain_errors(), attending_by_kernel():
        yield


@contextlib.contextmanager
def building_for(platform: str, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Sets the platform and the sharding that `tftpu.sharding` uses in the block.

    Args:
        platform: the platform of the devices: "tpu", "gpu" or "cpu".
        mesh: the devices.
    """
    with sharding.compiling_for(platform, _describe_sharding(mesh) if mesh.size > 1 else None):
        yield


def _describe_sharding(mesh: Mesh | AbstractMesh) -> Sharding:
    named = {name: axes for name, axes in _map_axes(mesh).items() if axes and name != EXAMPLES}
    devices = mesh.shape[SEQUENCE]
    return Sharding(
        {name: _count_parts(mesh, axes) for name, axes in named.items()},
        Ring(SEQUENCE, devices) if devices > 1 else None,
        functools.partial(_divide_function, mesh),
        functools.partial(_shard_array, mesh),
    )


def _map_axes(mesh: Mesh | AbstractMesh) -> dict[str, tuple[str, ...]]:
    """Returns, by the name of a dimension, the mesh axes with several devices that shard it."""
    found = {HEADS: (TENSOR,), CHANNELS: (TENSOR,), TIME: (SEQUENCE,), TOKENS: (SEQUENCE, TENSOR)}
    several = {
        name: tuple(axis for axis in axes if mesh.shape[axis] > 1) for name, axes in found.items()
    }
    return several | {EXAMPLES: meshes.list_batch_axes(mesh)}


def _count_parts(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _shard_array(mesh: Mesh | AbstractMesh, array: Any, dims: Sequence[str | None]) -> Any:
    """Implements `tftpu.sharding.shard` for a mesh, for dimensions that its axes divide.

    XLA chooses the sharding of all other dimensions, including the examples.
    """
    free = PartitionSpec.UNCONSTRAINED
    named = {name: axes for name, axes in _map_axes(mesh).items() if axes and name != EXAMPLES}
    spec = [
        named[name] if name in named and size % _count_parts(mesh, named[name]) == 0 else free
        for name, size in zip(dims, array.shape)
    ]
    if all(axes is free for axes in spec) or not isinstance(array, Tracer):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))


def _divide_function(
    mesh: Mesh | AbstractMesh, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
) -> Callable[..., Any]:
    """Implements `tftpu.sharding.shard_function` for a mesh.

    Examples are sharded along the mesh axes of the batch, heads and channels along `tensor`, and
    time along `sequence`. Every device computes indivisible dimensions in full.
    """
    axes = _map_axes(mesh)
    several = isinstance(outputs[0], tuple)

    def run(*given: Any) -> Any:
        used = {
            name: found
            for name, found in axes.items()
            if _is_divisible(_count_parts(mesh, found), name, inputs, given)
        }

        def build_spec(dims: Sequence[Any]) -> PartitionSpec:
            return PartitionSpec(*(used.get(_split_dimension(dim)[0]) or None for dim in dims))

        def compute_shard(*arrays: Any) -> Any:
            found = function(*arrays)
            return tuple(found) if several else found

        return jax.shard_map(
            compute_shard,
            mesh=mesh,
            in_specs=tuple(build_spec(dims) for dims in inputs),
            out_specs=tuple(build_spec(dims) for dims in outputs)
            if several
            else build_spec(outputs),
            check_vma=False,  # kernels do not declare over which axes their results vary
        )(*given)

    return run


def _is_divisible(parts: int, name: str, inputs: Sequence[Any], given: Sequence[Any]) -> bool:
    """Returns whether dimensions of this name divide into `parts` shards of whole units."""
    return all(
        array.shape[place] % (parts * _split_dimension(dim)[1]) == 0
        for dims, argument in zip(inputs, given)
        for array in jax.tree.leaves(argument)
        for place, dim in enumerate(dims)
        if _split_dimension(dim)[0] == name
    )


def _split_dimension(dim: Any) -> tuple[str, int]:
    """Returns a dimension's name ("" if none), and the size of its indivisible units."""
    return dim if isinstance(dim, tuple) else (dim or "", 1)
