"""Rotary positions on a TPU, in Pallas (Su et al. 2021, https://arxiv.org/abs/2104.09864).

XLA makes separate arrays of the halves of each head, and copies them from one layout to the other.
With head_dim 128, each half fills only half of the lanes of a TPU. The kernel reads and writes each
head once, as the projections lay them out: (batch, time, heads x head_dim).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tftpu.kernels.flash import LANES, Parameters

ROWS = 256  # tokens processed at a time
COLUMNS = 8  # most columns of lanes processed at a time


def rotate(
    x: jax.Array, cosine: jax.Array, sine: jax.Array, *, head_dim: int, interpret: bool = False
) -> jax.Array:
    """Rotates each pair (x[i], x[i + head_dim / 2]) of a head by its angle.

    Args:
        x: (batch, time, columns x 128); float.
        cosine: the cosine of each channel's angle, (batch or 1, time, the larger of 128 and
            head_dim), float32.
        sine: the sine, negative for the first half of a head, with the shape of cosine.
        head_dim: the channels of a head, a divisor or a multiple of 128.
        interpret: whether to run on a CPU, with Pallas's interpreter.

    Returns:
        The rotated heads, with the shape and dtype of x.
    """
    batch, time, width = x.shape
    lanes = cosine.shape[2]
    columns = math.gcd(width // lanes, COLUMNS)
    rows = min(ROWS, time)
    block = pl.BlockSpec((1, rows, columns * lanes), lambda b, i, c: (b, i, c))
    several = cosine.shape[0] > 1
    waves = pl.BlockSpec((1, rows, lanes), lambda b, i, c: (b if several else 0, i, 0))
    return pl.pallas_call(
        functools.partial(_body, head_dim=head_dim, lanes=lanes),
        grid=(batch, pl.cdiv(time, rows), width // (columns * lanes)),
        in_specs=[block, waves, waves],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=Parameters(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=0,  # the matrix unit computes nothing
            transcendentals=0,
            bytes_accessed=2 * x.size * x.dtype.itemsize + 2 * cosine.size * 4,
        ),
        interpret=interpret,
    )(x, cosine, sine)


def _body(x_ref, cosine_ref, sine_ref, out_ref, *, head_dim: int, lanes: int):
    cosine, sine, half = cosine_ref[0], sine_ref[0], head_dim // 2
    lane = jax.lax.broadcasted_iota(jnp.int32, cosine.shape, 1)
    for column in range(x_ref.shape[2] // lanes):
        at = slice(column * lanes, (column + 1) * lanes)
        x = x_ref[0, :, at].astype(jnp.float32)
        partner = pltpu.roll(x, half, 1)
        if head_dim < LANES:  # several heads per column: first halves are rolled the other way
            after = pltpu.roll(x, lanes - half, 1)
            partner = jnp.where(lane % head_dim < half, after, partner)
        out_ref[0, :, at] = (x * cosine + partner * sine).astype(out_ref.dtype)
