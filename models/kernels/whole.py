"""Self-attention over sequences that a TPU core holds whole, in Pallas: images, sentences.

Follows Dao et al. 2022, https://arxiv.org/abs/2205.14135, without their blocks: queries, keys and
values of an example lie in VMEM together, so the softmax is taken in one go and nothing is kept
for the backward pass. They are read as one projection writes them, side by side, and their gradient
is written so, with the bias's beside it: no array is split, joined, padded or laid out anew between
the matrix products. Sequences are of any length; 197 tokens need no padding.

Columns of 128 lanes and scores as in `tftpu.models.kernels.flash`. All is float32 between reading
and writing, and the matrix unit rounds its factors to bfloat16 itself: so v2 and v3 take it too,
whose kernels have no bfloat16 products.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tftpu.models.kernels.flash import _HIDDEN, _MEMORY, BLOCK, LANES, _Parameters, _product

LONGEST = 512  # tokens
LARGEST = 512 * 768 * 2  # bytes of an example's tokens: 14 times as many lie in VMEM, of 16 MiB


def takes(time: int, width: int, heads: int, itemsize: int) -> bool:
    """Whether sequences are short enough, and their heads fill columns of 128 lanes.

    Whole blocks are left to `tftpu.models.kernels.flash`: it need not pad them, and a BERT of 512
    tokens with dropout costs less so.
    """
    head_dim = width // heads
    lanes = max(LANES, head_dim)
    fits = time <= LONGEST and time % BLOCK and time * width * itemsize <= LARGEST
    return bool(fits) and lanes % head_dim == 0 and lanes % LANES == 0 and width % lanes == 0


def forward(qkv, segments, *, head_dim, interpret=False):
    """Attention of each token to all of its segment.

    Args:
        qkv: (batch, time, 3 x width): queries, keys and values, each head after head.
        segments: those of the queries and those of the keys, each (batch, time), int32: a query
            sees the keys of its own segment; None: all.
        head_dim: a divisor of 128, or a multiple.
        interpret: run it on a CPU, by Pallas's interpreter.

    Returns:
        (batch, time, width).
    """
    batch, time, width = _sizes(qkv)
    call = _call(_forward_body, qkv, segments, head_dim, products=2, arrays=4)
    return call(
        in_specs=[_rows(time, 3 * width), *_segment_specs(segments, time)],
        out_specs=_rows(time, width),
        out_shape=jax.ShapeDtypeStruct((batch, time, width), qkv.dtype),
        interpret=interpret,
    )(qkv, *_segment_arguments(segments))


def backward(qkv, segments, upstream, *, head_dim, interpret=False):
    """The gradient of `qkv`, and its sum over the tokens.

    Args:
        upstream: the gradient of the output, (batch, time, width).
        The others are as for `forward`.

    Returns:
        As `qkv`; and (batch, 1, 3 x width), float32.
    """
    batch, time, width = _sizes(qkv)
    call = _call(_backward_body, qkv, segments, head_dim, products=5, arrays=7)
    return call(
        in_specs=[
            *(_rows(time, 3 * width), _rows(time, width)),
            *_segment_specs(segments, time),
        ],
        out_specs=[_rows(time, 3 * width), _rows(1, 3 * width)],
        out_shape=[
            jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
            jax.ShapeDtypeStruct((batch, 1, 3 * width), jnp.float32),
        ],
        interpret=interpret,
    )(qkv, upstream, *_segment_arguments(segments))


def _forward_body(qkv_ref, *refs, head_dim, columns, lanes, product):
    segments, out_ref = refs[:-1], refs[-1]

    def column(index, _):
        query, key, value = _column(qkv_ref, index, head_dim, columns, lanes)
        mixed = jnp.zeros(query.shape[::-1], jnp.float32)  # (lanes, queries)
        for head in range(lanes // head_dim):
            own = _own(query, 1, head, head_dim)
            weight, total = _softmax(product(key, own, 1, 1), segments)
            mixed += _own(product(value, weight, 0, 0) / total, 0, head, head_dim)
        out_ref[0, :, _at(index, lanes)] = mixed.T.astype(out_ref.dtype)

    jax.lax.fori_loop(0, columns, column, None)


def _backward_body(qkv_ref, up_ref, *refs, head_dim, columns, lanes, product):
    segments, (of_qkv_ref, sums_ref) = refs[:-2], refs[-2:]

    def column(index, _):
        query, key, value = _column(qkv_ref, index, head_dim, columns, lanes)
        upstream = up_ref[0, :, _at(index, lanes)].astype(jnp.float32)
        of_query = of_key = of_value = jnp.zeros(query.shape, jnp.float32)
        for head in range(lanes // head_dim):
            # Where a factor is zero for other heads, so is its product with all of them.
            own_query, own_key, up = (_own(x, 1, head, head_dim) for x in (query, key, upstream))
            weight, total = _softmax(product(key, own_query, 1, 1), segments)
            weight /= total
            of_weight = product(value, up, 1, 1)  # (keys, queries)
            of_score = weight * (of_weight - jnp.sum(weight * of_weight, axis=0, keepdims=True))
            of_query += product(of_score, own_key, 0, 0)
            of_key += product(of_score, own_query, 1, 0)
            of_value += product(weight, up, 1, 0)
        for part, found in enumerate((of_query * head_dim**-0.5, of_key, of_value)):
            at = _at(part * columns + index, lanes)
            of_qkv_ref[0, :, at] = found.astype(of_qkv_ref.dtype)
            sums_ref[0, :, at] = jnp.sum(found, axis=0, keepdims=True)

    jax.lax.fori_loop(0, columns, column, None)


def _column(qkv_ref, index, head_dim: int, columns: int, lanes: int):
    """The heads of a column: scaled queries, keys and values, each (time, lanes), float32."""
    parts = (qkv_ref[0, :, _at(part * columns + index, lanes)] for part in range(3))
    query, key, value = (x.astype(jnp.float32) for x in parts)
    return query * head_dim**-0.5, key, value


def _at(index, lanes: int):
    return pl.ds(pl.multiple_of(index * lanes, lanes), lanes)


def _own(x, axis: int, head: int, head_dim: int):
    """Zeros but in one head's lanes, which lie along `axis`."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((lane >= head * head_dim) & (lane < (head + 1) * head_dim), x, 0.0)


def _softmax(scores, segments):
    """Weights, (keys, queries), and what to divide them by, (1, queries)."""
    if segments:
        of_queries, of_keys = segments
        scores = jnp.where(of_keys[0] == of_queries[0], scores, _HIDDEN)
    weight = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
    return weight, jnp.sum(weight, axis=0, keepdims=True)


def _sizes(qkv) -> tuple[int, int, int]:
    batch, time, three_widths = qkv.shape
    return batch, time, three_widths // 3


def _call(body, qkv, segments, head_dim: int, products: int, arrays: int):
    """A kernel over the examples, that is said to cost what it does.

    Args:
        products: over all scores; their rows are counted in whole sublanes, the rest in lanes.
        arrays: of (batch, time, width) that are read and written.
    """
    batch, time, width = _sizes(qkv)
    lanes = max(LANES, head_dim)
    scores = batch * (width // head_dim) * _up(time, 16) * _up(time, LANES)
    body = functools.partial(
        body,
        head_dim=head_dim,
        columns=width // lanes,
        lanes=lanes,
        product=_product(qkv.dtype),
    )
    return functools.partial(
        pl.pallas_call,
        body,
        grid=(batch,),
        compiler_params=_Parameters(dimension_semantics=("parallel",), vmem_limit_bytes=_MEMORY),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * lanes,
            transcendentals=scores,
            bytes_accessed=arrays * batch * time * width * qkv.dtype.itemsize,
        ),
    )


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _rows(time: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, time, width), lambda example: (example, 0, 0))


def _segment_specs(segments, time: int) -> list:
    """Of the segments along the lanes, for queries, and along the sublanes, for keys."""
    return [] if segments is None else [_rows(1, time), _rows(time, 1)]


def _segment_arguments(segments) -> list:
    return [] if segments is None else [segments[0][:, None, :], segments[1][:, :, None]]
