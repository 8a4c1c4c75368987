"""Runs attention over sequences that eight CPU devices share.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_ring

Pallas's interpreter runs the kernels. A line for each case: its name, the largest difference of
output and gradients to plain attention, relative to the largest number, and the exchanges between
devices that its program holds.
"""

import functools
from typing import Any

import jax
import numpy as np

import tftpu
from tests.support.programs import jax_kernels
from tftpu.engines.jax.tracing import tracing_for
from tftpu.kernels import flash, functions

CASES = {
    "causal": ("sequence:8", {"time": 2048, "heads": (2, 2, 2), "dim": 64}),
    "packed": ("data:2,sequence:4", {"time": 1024, "heads": (2, 2, 2), "dim": 64, "packed": True}),
    "grouped": ("data:2,sequence:2,tensor:2", {"time": 512, "heads": (4, 2, 2), "dim": 128}),
}


def main() -> None:
    """Prints the cases."""
    flash.BLOCK = 128
    functions._call = jax_kernels.interpreted
    for name, (mesh, case) in CASES.items():
        engine: Any = tftpu.connect("none", virtual_devices=8, mesh=mesh)
        compute, arrays = _case(**case)
        found = jax_kernels.difference(compute, engine.mesh, arrays)
        text = _program(compute, engine.mesh, arrays)
        print(name, f"{found:.2e}", text.count("ppermute"), flush=True)


def _case(time: int, heads: tuple[int, ...], dim: int, packed: bool = False) -> Any:
    rng = np.random.default_rng(0)
    examples = 2
    arrays = [rng.normal(size=(examples, time, n, dim)).astype("float32") for n in heads]
    options: dict[str, Any] = {"causal": True}
    if packed:
        options["segment_ids"] = np.sort(rng.integers(0, 5, (examples, time)), axis=1)
    return functools.partial(jax_kernels.general, **options), arrays


def _program(compute: Any, mesh: Any, arrays: list[np.ndarray]) -> str:
    def traced(arrays):
        with tracing_for("tpu", mesh):
            return compute(arrays, "flash")

    return str(jax.make_jaxpr(traced)(arrays))


if __name__ == "__main__":
    main()
