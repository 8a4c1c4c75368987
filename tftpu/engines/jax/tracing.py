"""The contexts in which models are built, and programs for a mesh traced."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tftpu.config.mesh import TENSOR
from tftpu.engines import keras_internals
from tftpu.engines.jax import mesh as meshes
from tftpu.tpu import target
from tftpu.tpu.target import EXAMPLES, HEADS, TOKENS, Sharing


@contextlib.contextmanager
def tracing_for(platform: str, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Enters the context in which a program is traced, as `building_for` does.

    JAX's errors keep their words: Keras would add the arguments of the layer, and fails to.
    """
    with building_for(platform, mesh), keras_internals.plain_errors():
        yield


@contextlib.contextmanager
def building_for(platform: str, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Sets the platform and the division of kernels within the block.

    Args:
        platform: of the devices, as `tftpu.tpu.target` names it.
        mesh: the devices.
    """
    with target.compiling_for(platform, _sharing(mesh) if mesh.size > 1 else None):
        yield


def _sharing(mesh: Mesh | AbstractMesh) -> Sharing:
    names = frozenset({HEADS, TOKENS} if mesh.shape[TENSOR] > 1 else ())
    return Sharing(names, functools.partial(_divided, mesh), functools.partial(_cut, mesh))


def _cut(mesh: Mesh | AbstractMesh, array: Any, dims: Sequence[str | None]) -> Any:
    """Returns what `tftpu.tpu.target.cut` promises, in a program; other sizes stay whole.

    Heads and tokens are along `tensor`; what else is shared is for XLA to decide.
    """
    free, parts = PartitionSpec.UNCONSTRAINED, mesh.shape[TENSOR]
    axes = [
        TENSOR if name in (HEADS, TOKENS) and array.shape[place] % parts == 0 else free
        for place, name in enumerate(dims)
    ]
    if TENSOR not in axes or not isinstance(array, Tracer):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))


def _divided(
    mesh: Mesh | AbstractMesh, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any
) -> Callable[..., Any]:
    """Returns what `tftpu.tpu.target.divided` promises.

    Devices share the examples along the axes that share the batch, and the heads along `tensor`.
    What does not divide is computed by each in full.
    """
    axes = {EXAMPLES: meshes.batch_axes(mesh), HEADS: (TENSOR,) if mesh.shape[TENSOR] > 1 else ()}
    several = isinstance(outputs[0], tuple)

    def run(*given: Any) -> Any:
        used = {
            name: found
            for name, found in axes.items()
            if _divides(math.prod(mesh.shape[axis] for axis in found), name, inputs, given)
        }

        def spec(dims: Sequence[Any]) -> PartitionSpec:
            return PartitionSpec(*(used.get(_name_and_unit(dim)[0]) or None for dim in dims))

        def part(*arrays: Any) -> Any:
            found = function(*arrays)
            return tuple(found) if several else found

        return jax.shard_map(
            part,
            mesh=mesh,
            in_specs=tuple(spec(dims) for dims in inputs),
            out_specs=tuple(spec(dims) for dims in outputs) if several else spec(outputs),
            check_vma=False,  # a kernel does not say how its results vary
        )(*given)

    return run


def _divides(parts: int, name: str, inputs: Sequence[Any], given: Sequence[Any]) -> bool:
    """Returns whether `parts` divides every dimension with a name, without cutting a unit."""
    return all(
        array.shape[place] % (parts * _name_and_unit(dim)[1]) == 0
        for dims, argument in zip(inputs, given)
        for array in jax.tree.leaves(argument)
        for place, dim in enumerate(dims)
        if _name_and_unit(dim)[0] == name
    )


def _name_and_unit(dim: Any) -> tuple[str, int]:
    """Returns the name of a dimension, "" if it has none, and the size that is not cut."""
    return dim if isinstance(dim, tuple) else (dim or "", 1)
