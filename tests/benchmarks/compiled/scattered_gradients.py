"""Prints how the TPU compiler adds up a gradient that is cut over all chips of a slice.

    python -m tests.benchmarks.compiled.scattered_gradients [SLICE ...]

Each device has its own examples and keeps one part of the kernel's gradient. The program asks
for that explicitly, by `psum_scatter` over all chips, or over one axis of the torus after the
other. Evidence: compiled.
"""

import os

# Read when libtpu is loaded; without them it looks for the chips of this machine.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.sums_over_devices import sums
from tftpu.tpu.slices import parse_slice

SLICES = ("v6e-8", "v5e-16", "v5e-32", "v5e-64")
WIDTH, HIDDEN, TOKENS = 4096, 14336, 1024  # tokens of a device
AXES = ("x", "y")


def main(names: list[str]) -> None:
    """Prints the collectives of each slice."""
    for name in names or SLICES:
        topology = topologies.get_topology_desc(parse_slice(name).topology, platform="tpu")
        devices = np.array(sorted(topology.devices, key=lambda device: tuple(device.coords)))
        rows = len({device.coords[0] for device in devices})
        mesh = Mesh(devices.reshape(rows, -1), AXES)
        for steps in ((AXES,), (("x",), ("y",))):
            axes = " then ".join("+".join(step) for step in steps)
            print(f"{name:8} {mesh.devices.shape}, over {axes:8}: {collectives(mesh, steps)}")


def collectives(mesh: Mesh, steps: tuple[tuple[str, ...], ...]) -> str:
    """Compiles the sum of a gradient, scattered in steps; returns what is left of them."""

    def gradient(x, d_y):
        found = jnp.einsum("ti,to->io", x, d_y, preferred_element_type=jnp.bfloat16)
        for axes in steps:
            found = jax.lax.psum_scatter(found, axes, scatter_dimension=0, tiled=True)
        return found

    examples = PartitionSpec(AXES)
    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=(examples, examples), out_specs=PartitionSpec(AXES)
    )
    given = [
        jax.ShapeDtypeStruct(
            (mesh.size * TOKENS, size), jnp.bfloat16, sharding=NamedSharding(mesh, examples)
        )
        for size in (WIDTH, HIDDEN)
    ]
    text = jax.jit(mapped).lower(*given).compile().as_text()
    return ", ".join(f"{kind} of {shape}" for kind, shape in sums(text))


if __name__ == "__main__":
    main(sys.argv[1:])
