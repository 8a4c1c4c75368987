"""Finds the FLOPs of traced computations, and the inputs that their results depend on."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from tftpu.engines.origins import (
    Origin,
    count_passes,
    find_argument_origins,
    merge_origins,
    stopped,
)

Jaxpr = Any  # jax.extend.core.Jaxpr; JAX publishes no types for its equations
# Calls whose body has the same inputs and outputs as the call itself.
_CALLS = ("jit", "pjit", "closed_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator")


def count_step_flops(jaxpr: Jaxpr, origins: Sequence[Origin]) -> int:
    """Returns the FLOPs of a step, forward and backward, from the jaxpr of its forward pass.

    Only matrix products and convolutions count, with two FLOPs per multiply-add. Batched products
    of activations with activations, as in attention, do not. This gives 6 x parameters x tokens for
    a transformer that is trained in full (see `tftpu.engines.origins`). Operations that no result
    depends on do not count. Of several branches, only the largest counts.

    Args:
        jaxpr: the forward pass.
        origins: the origin of each input of the forward pass.
    """
    return _count_jaxpr(jaxpr, origins)[0]


def _count_jaxpr(jaxpr: Jaxpr, given: Sequence[Origin]) -> tuple[int, list[Origin]]:
    """Returns the FLOPs of a computation, and the origin of each of its results."""
    origins = dict(zip(map(id, jaxpr.invars), given))
    total = 0
    for equation in _find_used(jaxpr):
        name = equation.primitive.name
        inputs = [origins.get(id(variable), Origin.NONE) for variable in equation.invars]
        bodies = list(_iterate_bodies(equation))
        if name == "dot_general":
            _, (batched, _) = equation.params["dimension_numbers"]
            total += count_passes(*inputs, batched=bool(batched)) * _count_product(equation)
        elif name == "conv_general_dilated":
            total += count_passes(*inputs) * _count_convolution(equation)
        # Random numbers count as data, whatever their seed depends on.
        origin = Origin.DATA if name in _RANDOM else merge_origins(inputs)
        outputs = [origin] * len(equation.outvars)
        if bodies:
            count, outputs = _count_called(equation, bodies, inputs)
            total += count * _count_runs(equation)
        for variable, origin in zip(equation.outvars, outputs):
            flows = name != "stop_gradient" and _is_differentiable(variable)
            origins[id(variable)] = origin if flows else stopped(origin)
    return total, [origins.get(id(variable), Origin.NONE) for variable in jaxpr.outvars]


def _count_called(
    equation: Any, bodies: list[Jaxpr], inputs: list[Origin]
) -> tuple[int, list[Origin]]:
    """Returns the FLOPs of the computations that an equation calls, and its results' origins."""
    # The first inputs of a scan are its constants, followed by the values that one iteration passes
    # to the next.
    first = equation.params["num_consts"] if equation.primitive.name == "scan" else 0
    carried = equation.params["num_carry"] if equation.primitive.name == "scan" else 0
    count = len(equation.outvars)
    while True:
        found = [
            _count_jaxpr(body, find_argument_origins(inputs, len(body.invars))) for body in bodies
        ]
        results = [outputs for _, outputs in found if len(outputs) == count]
        outputs = [merge_origins(origins) for origins in zip(*results)] or [
            merge_origins(inputs)
        ] * count
        after = [*inputs]
        for place in range(carried):
            after[first + place] |= outputs[place]
        if after == inputs:
            counts = [flops for flops, _ in found]
            total = max(counts) if equation.primitive.name == "cond" else sum(counts)
            return total, outputs
        inputs = after


def _count_runs(equation: Any) -> int:
    """Returns how often an equation's body runs: the steps of a scan, or devices of a shard_map.

    Devices that compute the same results count once.
    """
    given = equation.params
    if equation.primitive.name == "shard_map":
        parts = [part for spec in given["out_specs"] for part in spec if part is not None]
        axes = {axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))}
        return math.prod(given["mesh"].shape[axis] for axis in axes)
    return given["length"] if equation.primitive.name == "scan" else 1


def _find_used(jaxpr: Jaxpr) -> list[Any]:
    """Returns the equations that the results depend on."""
    wanted, found = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(id(variable) in wanted for variable in equation.outvars):
            wanted |= set(map(id, equation.invars))
            found.append(equation)
    return found[::-1]


def find_reached(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[bool]:
    """Returns for each of the given inputs whether the results of a computation depend on it.

    Only a dependence through which a gradient can flow counts, not one through integers or through
    `stop_gradient`.

    Args:
        jaxpr: the computation.
        inputs: some of `jaxpr.invars`.
    """
    found = _find_needed(jaxpr, [True] * len(jaxpr.outvars))
    needed = {id(v) for v, is_needed in zip(jaxpr.invars, found) if is_needed}
    return [id(v) in needed for v in inputs]


def _find_needed(jaxpr: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Returns for each input whether any output marked True in `outputs` depends on it."""
    needed = {id(v) for v, marked in zip(jaxpr.outvars, outputs) if marked}
    for equation in reversed(jaxpr.eqns):
        marked = [id(v) in needed and _is_differentiable(v) for v in equation.outvars]
        if not any(marked) or equation.primitive.name == "stop_gradient":
            continue
        inner = next(iter(_iterate_bodies(equation)), None)
        if (
            equation.primitive.name in _CALLS
            and inner is not None
            and len(inner.invars) == len(equation.invars)
        ):
            uses = _find_needed(inner, marked)
        else:
            uses = [True] * len(equation.invars)
        needed |= {id(v) for v, used in zip(equation.invars, uses) if used}
    return [id(v) in needed for v in jaxpr.invars]


def _is_differentiable(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _iterate_bodies(equation: Any) -> Iterator[Jaxpr]:
    """Yields the computations that an equation calls."""
    for value in equation.params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def _count_product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    inner = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * inner


def _count_convolution(equation: Any) -> int:
    numbers, params = equation.params["dimension_numbers"], equation.params
    image, kernel = (v.aval.shape for v in equation.invars)
    output = equation.outvars[0].aval.shape
    taps = 1
    for place, (into, of_kernel, out) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:])
    ):
        stride, dilation = params["window_strides"][place], params["rhs_dilation"][place]
        before, spread = params["padding"][place][0], params["lhs_dilation"][place]
        places = (
            o * stride + k * dilation - before
            for o in range(output[out])
            for k in range(kernel[of_kernel])
        )
        # A transposed convolution puts zeros between the pixels of its input.
        last = (image[into] - 1) * spread
        taps *= sum(0 <= at <= last and at % spread == 0 for at in places)
    channels = kernel[numbers.rhs_spec[1]]  # input channels of one group
    return 2 * output[numbers.out_spec[0]] * taps * channels * output[numbers.out_spec[1]]
