"""Self-attention over sequences short enough for a TPU core's memory, in Pallas.

Meant for images and sentences. Follows Dao et al. 2022, https://arxiv.org/abs/2205.14135, without
their blocks: queries, keys and values of an example are in VMEM together, so the softmax takes
one step and nothing is kept for the backward pass. They are read side by side, as one projection
writes them. Their gradient is written in the same layout, with the bias's gradient: no array is
split, joined, padded or copied between the matrix products. Sequences can have any length; 197
tokens need no padding.

Columns of 128 lanes and transposed scores are as in `tftpu.kernels.flash`. Everything is float32
between reading and writing, so the kernel also runs on v2 and v3, which support no bfloat16 product
in a kernel. Unless the arrays are float32, the matrix unit itself rounds factors to bfloat16.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tftpu.kernels.flash import (
    BLOCK,
    HIDDEN,
    LANES,
    VMEM,
    Parameters,
    Segments,
    build_product,
)

LONGEST = 512  # longest sequence, in tokens
# Most bytes of an example's tokens; the kernel keeps 14 times as many in the 16 MiB of VMEM.
LARGEST = 512 * 768 * 2


def takes(time: int, width: int, heads: int, itemsize: int) -> bool:
    """Returns whether sequences are short enough, and their heads fill columns of 128 lanes.

    Multiples of `flash.BLOCK` are left to `tftpu.kernels.flash`, which need not pad them, and
    is cheaper than this kernel for a BERT of 512 tokens with dropout.
    """
    head_dim = width // heads
    lanes = max(LANES, head_dim)
    fits = time <= LONGEST and time % BLOCK and time * width * itemsize <= LARGEST
    return bool(fits) and lanes % head_dim == 0 and lanes % LANES == 0 and width % lanes == 0


def forward(
    qkv: jax.Array, segments: Segments | None, *, head_dim: int, interpret: bool = False
) -> jax.Array:
    """Computes attention of each token to all tokens of its segment.

    Args:
        qkv: (batch, time, 3 x width): queries, keys and values, each head after head.
        segments: the segment ids of queries and of keys, each (batch, time) int32; a query sees
            only keys of the same segment. None: all keys.
        head_dim: the channels of a head, a divisor or a multiple of 128.
        interpret: whether to run on a CPU, with Pallas's interpreter.

    Returns:
        (batch, time, width), of qkv's dtype.
    """
    batch, time, width = _unpack_sizes(qkv)
    call = _call(_forward_body, qkv, head_dim, products=2, arrays=4)
    return call(
        in_specs=[_build_row_spec(time, 3 * width), *_build_segment_specs(segments, time)],
        out_specs=_build_row_spec(time, width),
        out_shape=jax.ShapeDtypeStruct((batch, time, width), qkv.dtype),
        interpret=interpret,
    )(qkv, *_build_segment_arguments(segments))


def backward(
    qkv: jax.Array,
    segments: Segments | None,
    upstream: jax.Array,
    *,
    head_dim: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradient with respect to `qkv`, and its sums over the tokens, for the bias.

    Args:
        qkv: see `forward`; the same for segments, head_dim and interpret.
        upstream: the gradient with respect to the output, (batch, time, width).

    Returns:
        d_qkv: has the shape and dtype of qkv.
        sums: (batch, 1, 3 x width), float32.
    """
    batch, time, width = _unpack_sizes(qkv)
    call = _call(_backward_body, qkv, head_dim, products=5, arrays=7)
    return call(
        in_specs=[
            *(_build_row_spec(time, 3 * width), _build_row_spec(time, width)),
            *_build_segment_specs(segments, time),
        ],
        out_specs=[_build_row_spec(time, 3 * width), _build_row_spec(1, 3 * width)],
        out_shape=[
            jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
            jax.ShapeDtypeStruct((batch, 1, 3 * width), jnp.float32),
        ],
        interpret=interpret,
    )(qkv, upstream, *_build_segment_arguments(segments))


def _forward_body(qkv_ref, *refs, head_dim, columns, lanes, product):
    segments, out_ref = refs[:-1], refs[-1]

    def attend_column(index, _):
        query, key, value = _read_column(qkv_ref, index, head_dim, columns, lanes)
        mixed = jnp.zeros(query.shape[::-1], jnp.float32)  # (lanes, queries)
        for head in range(lanes // head_dim):
            own = _mask_to_head(query, 1, head, head_dim)
            weight, total = _compute_softmax(product(key, own, 1, 1), segments)
            mixed += _mask_to_head(product(value, weight, 0, 0) / total, 0, head, head_dim)
        out_ref[0, :, _index_column(index, lanes)] = mixed.T.astype(out_ref.dtype)

    jax.lax.fori_loop(0, columns, attend_column, None)


def _backward_body(qkv_ref, up_ref, *refs, head_dim, columns, lanes, product):
    segments, (d_qkv_ref, sums_ref) = refs[:-2], refs[-2:]

    def differentiate_column(index, _):
        query, key, value = _read_column(qkv_ref, index, head_dim, columns, lanes)
        upstream = up_ref[0, :, _index_column(index, lanes)].astype(jnp.float32)
        d_query = d_key = d_value = jnp.zeros(query.shape, jnp.float32)
        for head in range(lanes // head_dim):
            # A factor that is zero for the other heads makes their products zero as well.
            own_query, own_key, up = (
                _mask_to_head(x, 1, head, head_dim) for x in (query, key, upstream)
            )
            weight, total = _compute_softmax(product(key, own_query, 1, 1), segments)
            weight /= total
            d_weight = product(value, up, 1, 1)  # (keys, queries)
            d_score = weight * (d_weight - jnp.sum(weight * d_weight, axis=0, keepdims=True))
            d_query += product(d_score, own_key, 0, 0)
            d_key += product(d_score, own_query, 1, 0)
            d_value += product(weight, up, 1, 0)
        for part, found in enumerate((d_query * head_dim**-0.5, d_key, d_value)):
            at = _index_column(part * columns + index, lanes)
            d_qkv_ref[0, :, at] = found.astype(d_qkv_ref.dtype)
            sums_ref[0, :, at] = jnp.sum(found, axis=0, keepdims=True)

    jax.lax.fori_loop(0, columns, differentiate_column, None)


def _read_column(qkv_ref, index, head_dim: int, columns: int, lanes: int):
    """Returns a column's scaled queries, its keys and its values, each (time, lanes) float32."""
    parts = (qkv_ref[0, :, _index_column(part * columns + index, lanes)] for part in range(3))
    query, key, value = (x.astype(jnp.float32) for x in parts)
    return query * head_dim**-0.5, key, value


def _index_column(index, lanes: int):
    return pl.ds(pl.multiple_of(index * lanes, lanes), lanes)


def _mask_to_head(x: jax.Array, axis: int, head: int, head_dim: int) -> jax.Array:
    """Sets all lanes along `axis` to zero, except those of one head."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((lane >= head * head_dim) & (lane < (head + 1) * head_dim), x, 0.0)


def _compute_softmax(scores, segments):
    """Returns the softmax's exponentials, (keys, queries), and their sums, (1, queries)."""
    if segments:
        query_segments, key_segments = segments
        scores = jnp.where(key_segments[0] == query_segments[0], scores, HIDDEN)
    weight = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
    return weight, jnp.sum(weight, axis=0, keepdims=True)


def _unpack_sizes(qkv: jax.Array) -> tuple[int, int, int]:
    """Returns batch, time and width of (batch, time, 3 x width)."""
    batch, time, three_widths = qkv.shape
    return batch, time, three_widths // 3


def _call(
    body: Callable, qkv: jax.Array, head_dim: int, products: int, arrays: int
) -> Callable[..., Any]:
    """Returns `pl.pallas_call` for a kernel that runs once per example, with its cost estimate.

    Args:
        body: the function of the kernel.
        qkv: see `forward`; the same for head_dim.
        products: number of matrix products for each head. The estimate rounds the rows of the
            scores up to whole sublanes, and their columns to whole lanes.
        arrays: number of arrays of (batch, time, width) that are read and written.
    """
    batch, time, width = _unpack_sizes(qkv)
    lanes = max(LANES, head_dim)
    scores = batch * (width // head_dim) * _round_up(time, 16) * _round_up(time, LANES)
    body = functools.partial(
        body,
        head_dim=head_dim,
        columns=width // lanes,
        lanes=lanes,
        product=build_product(qkv.dtype),
    )
    return functools.partial(
        pl.pallas_call,
        body,
        grid=(batch,),
        compiler_params=Parameters(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * lanes,
            transcendentals=scores,
            bytes_accessed=arrays * batch * time * width * qkv.dtype.itemsize,
        ),
    )


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _build_row_spec(time: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, time, width), lambda example: (example, 0, 0))


def _build_segment_specs(segments: Segments | None, time: int) -> list[pl.BlockSpec]:
    """Returns the specs of the queries' segments, along lanes, and the keys', along sublanes."""
    return [] if segments is None else [_build_row_spec(1, time), _build_row_spec(time, 1)]


def _build_segment_arguments(segments: Segments | None) -> list[jax.Array]:
    return [] if segments is None else [segments[0][:, None, :], segments[1][:, :, None]]
