"""Runs the kernels on a mesh of eight CPU devices, for `tests/engines/jax/test_jax_kernels.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_kernels

Pallas's interpreter runs them. A line for each case: its name, the largest difference of output and
gradients to plain attention, relative to the largest number, and the kernels that ran divided.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import tftpu
from tftpu import sharding
from tftpu.engines.jax.tracing import tracing_for
from tftpu.kernels import flash, functions
from tftpu.kernels.attention import attention
from tftpu.models.families import llama
from tftpu.models.layers.self_attention import SelfAttention

SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (8, 256)), axis=1)
DIVIDED: set[str] = set()


def interpreted(function: functools.partial, inputs: Any, outputs: Any) -> Callable:
    """Stands for `functions._call`: the kernel by Pallas's interpreter."""
    divided = sharding.shard_function(functools.partial(function, interpret=True), inputs, outputs)

    def run(*given):
        here = jax.make_jaxpr(divided)(*given)
        if any(equation.primitive.name == "shard_map" for equation in here.eqns):
            DIVIDED.add(function.func.__name__)
        return divided(*given)

    return run


def difference(compute: Callable, mesh: Any, arrays: list[np.ndarray]) -> float:
    """Returns how far the kernel is from plain attention."""

    def results(implementation: str) -> list[np.ndarray]:
        def loss(arrays):
            found = compute(arrays, implementation)
            weight = np.random.default_rng(2).normal(size=found.shape)
            return (found * weight).sum(), found

        def traced(arrays):
            with tracing_for("tpu", mesh):
                return jax.value_and_grad(loss, has_aux=True)(arrays)

        (_, found), grads = jax.jit(traced)(arrays)
        return [np.asarray(one) for one in (found, *grads)]

    pairs = zip(results("flash"), results("plain"))
    return max(np.abs(fast - plain).max() / np.abs(plain).max() for fast, plain in pairs)


def general(arrays: list[Any], implementation: str, **options: Any) -> Any:
    return attention(*arrays, implementation=implementation, **options)


def whole(arrays: list[Any], implementation: str, layers: dict[str, SelfAttention]) -> Any:
    return layers[implementation](arrays[0])


def rotated(arrays: list[Any], implementation: str, examples: int = 1) -> Any:
    angles = np.random.default_rng(3).normal(size=(examples, 256, 64)).astype("float32")
    return llama.rotate(arrays[0], angles, implementation)


def main() -> None:
    """Prints the cases."""
    engine: Any = tftpu.connect("none", virtual_devices=8, mesh="data:2,fsdp:2,tensor:2")
    flash.BLOCK = 128
    functions._call = interpreted
    rng = np.random.default_rng(0)

    def heads(*counts: int, examples: int = 8, dim: int = 64) -> list[np.ndarray]:
        return [rng.normal(size=(examples, 256, n, dim)).astype("float32") for n in counts]

    layers = {name: SelfAttention(2, name) for name in ("flash", "plain")}
    for layer in layers.values():
        layer.build((8, 37, 128))
    for ours, theirs in zip(*(layer.weights for layer in layers.values())):
        ours.assign(theirs.value)
    cases = {
        "causal": (functools.partial(general, causal=True), heads(4, 4, 4)),
        "packed": (functools.partial(general, causal=True, segment_ids=SEGMENTS), heads(4, 2, 2)),
        "grouped": (functools.partial(general, causal=True), heads(4, 2, 2, dim=128)),
        "one column": (general, heads(2, 2, 2)),  # which two devices cannot share
        "three examples": (general, heads(4, 4, 4, examples=3)),
        "whole": (
            functools.partial(whole, layers=layers),
            [rng.normal(size=(8, 37, 128)).astype("float32")],
        ),
        "rotary": (rotated, [rng.normal(size=(8, 256, 512)).astype("float32")]),
        "rotary by example": (
            functools.partial(rotated, examples=8),
            [rng.normal(size=(8, 256, 256)).astype("float32")],
        ),
    }
    for name, (compute, arrays) in cases.items():
        DIVIDED.clear()
        found = difference(compute, engine.mesh, arrays)
        print(name.replace(" ", "_"), f"{found:.2e}", *sorted(DIVIDED))


if __name__ == "__main__":
    main()
