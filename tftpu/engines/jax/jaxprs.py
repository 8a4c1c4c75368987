"""Reads traced computations: the FLOPs of products, and the inputs that results depend on."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

# Once forward; backward once for the input and once for the weights.
PASSES = 3
Jaxpr = Any  # jax.extend.core.Jaxpr; JAX publishes no types for its equations
# Calls whose body has the same inputs and outputs.
_CALLS = ("jit", "pjit", "closed_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def flops(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of the products with weights of a forward pass, as preflight counts them.

    A multiplication and its addition count as two. Elementwise operations are left out, and so are
    batched products of activations with activations, such as attention's: 6 x parameters x tokens
    for a transformer (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361).
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _product(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        else:
            repeats = equation.params.get("length", 1) if name == "scan" else 1
            total += repeats * sum(flops(body) for body in _bodies(equation))
    return total


def reached(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[bool]:
    """Returns, for each of some inputs of a computation, whether its results depend on it.

    A dependence counts where a gradient could flow: through numbers that are not whole, and not
    through `stop_gradient`.

    Args:
        jaxpr: the computation.
        inputs: some of `jaxpr.invars`.
    """
    found = _needed(jaxpr, [True] * len(jaxpr.outvars))
    needed = {id(v) for v, is_needed in zip(jaxpr.invars, found) if is_needed}
    return [id(v) in needed for v in inputs]


def _needed(jaxpr: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Returns which inputs the marked outputs depend on."""
    needed = {id(v) for v, marked in zip(jaxpr.outvars, outputs) if marked}
    for equation in reversed(jaxpr.eqns):
        marked = [id(v) in needed and _differentiable(v) for v in equation.outvars]
        if not any(marked) or equation.primitive.name == "stop_gradient":
            continue
        inner = next(iter(_bodies(equation)), None)
        if (
            equation.primitive.name in _CALLS
            and inner is not None
            and len(inner.invars) == len(equation.invars)
        ):
            uses = _needed(inner, marked)
        else:
            uses = [True] * len(equation.invars)
        needed |= {id(v) for v, used in zip(equation.invars, uses) if used}
    return [id(v) in needed for v in jaxpr.invars]


def _differentiable(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _bodies(equation: Any) -> Iterator[Jaxpr]:
    """Yields the computations that an equation calls."""
    for value in equation.params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def _product(equation: Any) -> int:
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    if batched:
        return 0
    left = equation.invars[0].aval.shape
    inner = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * inner


def _convolution(equation: Any) -> int:
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
        # A transposed convolution spreads its input, with zeros between.
        last = (image[into] - 1) * spread
        taps *= sum(0 <= at <= last and at % spread == 0 for at in places)
    channels = kernel[numbers.rhs_spec[1]]  # of the output's group
    return 2 * output[numbers.out_spec[0]] * taps * channels * output[numbers.out_spec[1]]
