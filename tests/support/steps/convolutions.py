"""Differentiates convolutions of groups on 8 devices, for `tests/engines/jax/test_convolution.py`.

    KERAS_BACKEND=jax python -m tests.support.steps.convolutions

Prints, as JSON, the largest relative difference of a convolution and its gradients from those on
one device, by cases: divided by the engine, and by XLA alone.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import tftpu
from tftpu.config.mesh import mesh_sizes
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.tracing import tracing_for

MESHES = "data:2,tensor:4", "fsdp:2,sequence:2,tensor:2"
WINDOWS = (1, 1), (3, 1), (1, 2)  # strides and dilations: Keras refuses both together
CHANNELS, FILTERS, EXAMPLES = 16, 32, 4


def main() -> None:
    """Prints the differences."""
    tftpu.connect("none", virtual_devices=8)
    found: dict[str, dict[str, float]] = {"engine": {}, "XLA": {}}
    cases = itertools.product(MESHES, (1, 2), WINDOWS, (2, 4, 16), ("data", "filters"))
    for number, (axes, rank, (stride, dilation), groups, divided) in enumerate(cases):
        first = number % 5 < 2  # channels first
        mesh = meshes.make(mesh_sizes(axes, 8), jax.devices())
        inputs, kernel, options = draw(rank, groups, first)
        options |= {"window_strides": (stride,) * rank, "rhs_dilation": (dilation,) * rank}
        expected = differentiate(inputs, kernel, options)
        batch = PartitionSpec(meshes.list_batch_axes(mesh))
        inputs = jax.device_put(inputs, NamedSharding(mesh, batch))
        last = "tensor" if divided == "filters" else None
        spec = PartitionSpec(*[None] * (rank + 1), last)
        kernel = jax.device_put(kernel, NamedSharding(mesh, spec))
        name = f"{axes} {rank}d stride {stride} dilation {dilation} groups {groups} {divided}"
        if groups >= 4:  # XLA ends the process where the axis does not divide the groups
            found["XLA"][name] = compare(differentiate(inputs, kernel, options), expected)
        with tracing_for("cpu", mesh):
            found["engine"][name] = compare(differentiate(inputs, kernel, options), expected)
    found["vmap"] = compare_experts()
    print(json.dumps(found))


def compare_experts() -> dict[str, float]:
    """Returns the differences of experts' convolutions, which `vmap` makes those of groups."""
    rng, found = np.random.default_rng(0), {}
    inputs = rng.normal(size=(3, EXAMPLES, 9, CHANNELS)).astype("f")
    kernels = rng.normal(size=(3, 3, CHANNELS, FILTERS)).astype("f")
    expected = differentiate(inputs, kernels, {}, convolve_experts)
    for axes in MESHES:
        mesh = meshes.make(mesh_sizes(axes, 8), jax.devices())
        batch = NamedSharding(mesh, PartitionSpec(None, meshes.list_batch_axes(mesh)))
        whole = NamedSharding(mesh, PartitionSpec())
        placed = jax.device_put(inputs, batch), jax.device_put(kernels, whole)
        with tracing_for("cpu", mesh):
            found[axes] = compare(differentiate(*placed, {}, convolve_experts), expected)
    return found


def convolve_experts(inputs: Any, kernels: Any) -> Any:
    """Convolves the inputs of each expert by its own kernel."""
    return keras.ops.vectorized_map(lambda both: keras.ops.conv(*both), (inputs, kernels))


def draw(rank: int, groups: int, first: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Returns inputs, a kernel, and how JAX calls their dimensions."""
    rng, space = np.random.default_rng(rank * groups), "HW"[:rank]
    kernel = rng.normal(size=(3, 2)[:rank] + (CHANNELS // groups, FILTERS))
    sizes = (9, 8)[:rank]
    shape = (EXAMPLES, CHANNELS, *sizes) if first else (EXAMPLES, *sizes, CHANNELS)
    names = f"NC{space}" if first else f"N{space}C"
    options = {"dimension_numbers": (names, f"{space}IO", names), "feature_group_count": groups}
    return rng.normal(size=shape).astype("f"), kernel.astype("f"), {**options, "padding": "SAME"}


def differentiate(
    inputs: Any,
    kernel: Any,
    options: dict[str, Any],
    convolve: Callable[..., Any] | None = None,
) -> list[np.ndarray]:
    """Returns the sum of the squares of what a convolution returns, and its gradients."""

    def add_up(inputs: Any, kernel: Any) -> jax.Array:
        # Looked up here: the engine may have replaced it.
        return jnp.sum((convolve or jax.lax.conv_general_dilated)(inputs, kernel, **options) ** 2)

    found = jax.jit(jax.value_and_grad(add_up, (0, 1)))(inputs, kernel)
    return [np.asarray(array) for array in jax.tree.leaves(found)]


def compare(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Returns the largest difference, relative to the largest expected value of an array."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


if __name__ == "__main__":
    main()
