"""Flash attention on a TPU: Dao et al. 2022, https://arxiv.org/abs/2205.14135, in Pallas.

No matrix of scores ever lies in HBM: a block of queries meets one block of keys after the other in
the core's own memory, and the backward pass computes the scores again from the softmax's
denominators. Where keys come later than all queries of a block, nothing is computed.

Layout: (batch, time, heads x head_dim) as the projections write it, cut into columns of 128, the
lanes of a TPU. With head_dim 64 two heads share a column; each is masked in one factor of a
product, which costs the matrix unit nothing, for it works on 128 lanes anyway. Scores are held
transposed, (keys, queries), so that the maxima and sums of a query lie along the lanes.

All is float32 between reading and writing, and the matrix unit rounds its factors to bfloat16
itself: v2 and v3 take no bfloat16 product in a kernel.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK = 256  # queries, and keys, that meet at a time
LONGEST = 8192  # tokens: the keys and values of a column lie in VMEM whole
_HIDDEN = -1e9
_MEMORY = 64 * 2**20  # bytes of VMEM that the kernels may use
# Renamed in jax 0.7.
_Parameters = getattr(pltpu, "CompilerParams", None) or pltpu.TPUCompilerParams


def forward(query, key, value, segments, *, head_dim, causal, interpret=False):
    """Attention, and the logarithm of the softmax's denominator of each query and head.

    Args:
        query, key, value: (batch, time, columns x 128); time is a multiple of `BLOCK`. The query
            is scaled.
        segments: those of the queries and those of the keys, each (batch, time), int32: a query
            sees the keys of its own segment; None: all.
        head_dim: a divisor of 128, or a multiple.
        causal: a query sees the keys up to its own position.
        interpret: run it on a CPU, by Pallas's interpreter.

    Returns:
        output: as `query`.
        log_sum: (batch, columns, heads a column, time), float32.
    """
    batch, time, width = query.shape
    lanes = max(LANES, head_dim)
    heads, columns = lanes // head_dim, width // lanes
    segmented = segments is not None
    row = pl.BlockSpec((1, BLOCK, lanes), lambda b, c, i: (b, i, c))
    whole = pl.BlockSpec((1, time, lanes), lambda b, c, i: (b, 0, c))
    body = functools.partial(
        _forward_body, heads=heads, head_dim=head_dim, causal=causal, segmented=segmented
    )
    return pl.pallas_call(
        body,
        grid=(batch, columns, time // BLOCK),
        in_specs=[row, whole, whole, *_segment_specs(segmented, BLOCK, time)],
        out_specs=[row, pl.BlockSpec((1, 1, heads, BLOCK), lambda b, c, i: (b, c, 0, i))],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, columns, heads, time), jnp.float32),
        ],
        compiler_params=_Parameters(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_MEMORY
        ),
        cost_estimate=_cost(query, heads, columns, lanes, causal, products=2, arrays=4),
        interpret=interpret,
    )(query, key, value, *_segment_arguments(segments))


def backward(
    query, key, value, segments, log_sum, shift, upstream, *, head_dim, causal, interpret=False
):
    """The gradients of query, key and value.

    Args:
        log_sum: as `forward` gave it.
        shift: (batch, columns, heads a column, time), float32: the sum over head_dim of the
            output times its gradient.
        upstream: the gradient of the output, as `query`.
        The others are as for `forward`.

    Returns:
        Three arrays as `query`, of which the first is float32.
    """
    batch, time, width = query.shape
    lanes = max(LANES, head_dim)
    heads, columns = lanes // head_dim, width // lanes
    segmented = segments is not None
    row = pl.BlockSpec((1, BLOCK, lanes), lambda b, c, i: (b, i, c))
    whole = pl.BlockSpec((1, time, lanes), lambda b, c, i: (b, 0, c))
    sums = pl.BlockSpec((1, 1, heads, time), lambda b, c, i: (b, c, 0, 0))
    body = functools.partial(
        _backward_body, heads=heads, head_dim=head_dim, causal=causal, segmented=segmented
    )
    return pl.pallas_call(
        body,
        grid=(batch, columns, time // BLOCK),
        in_specs=[whole, row, row, whole, sums, sums, *_segment_specs(segmented, time, BLOCK)],
        out_specs=[whole, row, row],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ],
        compiler_params=_Parameters(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_MEMORY
        ),
        cost_estimate=_cost(query, heads, columns, lanes, causal, products=5, arrays=8),
        interpret=interpret,
    )(query, key, value, upstream, log_sum, shift, *_segment_arguments(segments))


def _forward_body(q_ref, k_ref, v_ref, *refs, heads, head_dim, causal, segmented):
    segments, (out_ref, log_sum_ref) = refs[:-2], refs[-2:]
    block, product = pl.program_id(2), _product(q_ref.dtype)
    query = q_ref[0].astype(jnp.float32)  # (BLOCK, lanes)
    output = jnp.zeros(query.shape, jnp.float32)
    for head in range(heads):
        mine = _lanes_of(head, head_dim, query.shape)
        own = jnp.where(mine, query, 0) if heads > 1 else query

        def step(index, state, own=own, diagonal=False):
            largest, total, mixed = state
            at = pl.ds(pl.multiple_of(index * BLOCK, BLOCK), BLOCK)
            scores = product(k_ref[0, at, :].astype(jnp.float32), own, 1, 1)  # (keys, queries)
            visible = _visible(segments, at, slice(None), segmented, diagonal)
            scores = scores if visible is None else jnp.where(visible, scores, _HIDDEN)
            new = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
            weight = jnp.exp(scores - new)
            kept = jnp.exp(largest - new)  # (1, queries)
            total = total * kept + jnp.sum(weight, axis=0, keepdims=True)
            mixed = mixed * kept + product(v_ref[0, at, :].astype(jnp.float32), weight, 0, 0)
            return new, total, mixed

        start = (
            jnp.full((1, BLOCK), -jnp.inf, jnp.float32),
            jnp.zeros((1, BLOCK), jnp.float32),
            jnp.zeros(query.shape[::-1], jnp.float32),  # (lanes, queries)
        )
        if causal:
            state = jax.lax.fori_loop(0, block, step, start)
            largest, total, mixed = step(block, state, diagonal=True)
        else:
            largest, total, mixed = jax.lax.fori_loop(0, k_ref.shape[1] // BLOCK, step, start)
        output = jnp.where(mine, (mixed / total).T, output)
        log_sum_ref[0, 0, head, :] = (largest + jnp.log(total))[0]
    out_ref[0] = output.astype(out_ref.dtype)


def _backward_body(
    q_ref, k_ref, v_ref, up_ref, log_sum_ref, shift_ref, *refs, heads, head_dim, causal, segmented
):
    segments, (dq_ref, dk_ref, dv_ref) = refs[:-3], refs[-3:]
    block, product = pl.program_id(2), _product(q_ref.dtype)

    @pl.when(block == 0)
    def _():
        dq_ref[0] = jnp.zeros(dq_ref.shape[1:], jnp.float32)

    key, value = (ref[0].astype(jnp.float32) for ref in (k_ref, v_ref))  # (BLOCK, lanes)
    zeros = jnp.zeros(key.shape, jnp.float32)
    of_key, of_value = zeros, zeros
    for head in range(heads):
        mine = _lanes_of(head, head_dim, key.shape)
        own_key, own_value = (jnp.where(mine, x, 0) if heads > 1 else x for x in (key, value))

        def step(
            index, state, own_key=own_key, own_value=own_value, head=head, mine=mine, diagonal=False
        ):
            of_key, of_value = state
            at = pl.ds(pl.multiple_of(index * BLOCK, BLOCK), BLOCK)
            query, up = (ref[0, at, :].astype(jnp.float32) for ref in (q_ref, up_ref))
            scores = product(own_key, query, 1, 1)  # (keys, queries)
            visible = _visible(segments, slice(None), at, segmented, diagonal)
            scores = scores if visible is None else jnp.where(visible, scores, _HIDDEN)
            weight = jnp.exp(scores - log_sum_ref[0, 0, pl.ds(head, 1), at])
            of_value += product(weight, up, 1, 0)
            of_score = product(own_value, up, 1, 1)
            of_score = weight * (of_score - shift_ref[0, 0, pl.ds(head, 1), at])
            of_key += product(of_score, query, 1, 0)
            dq_ref[0, at, :] += product(of_score, own_key, 0, 0)
            return of_key, of_value

        state, first = (zeros, zeros), 0
        if causal:
            state, first = step(block, state, diagonal=True), block + 1
        found = jax.lax.fori_loop(first, q_ref.shape[1] // BLOCK, step, state)
        of_key = jnp.where(mine, found[0], of_key)
        of_value = jnp.where(mine, found[1], of_value)
    dk_ref[0] = of_key.astype(dk_ref.dtype)
    dv_ref[0] = of_value.astype(dv_ref.dtype)


def _product(dtype):
    """A matrix product of float32 arrays over one axis of each, exact to what `dtype` holds."""
    # One pass of the matrix unit, which rounds to bfloat16; as many as it takes for float32.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def product(left, right, left_axis: int, right_axis: int):
        return jax.lax.dot_general(
            left,
            right,
            (((left_axis,), (right_axis,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )

    return product


def _lanes_of(head: int, head_dim: int, shape: tuple):
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (lane >= head * head_dim) & (lane < (head + 1) * head_dim)


def _visible(segments, keys, queries, segmented: bool, diagonal: bool):
    """Which keys are seen: (keys, queries), bool; None: all. On the diagonal no later ones."""
    visible = None
    if diagonal:
        key, query = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), a) for a in (0, 1))
        visible = key <= query
    if segmented:
        of_queries, of_keys = segments
        same = of_keys[0, keys, :] == of_queries[0, :, queries]
        visible = same if visible is None else visible & same
    return visible


def _segment_specs(segmented: bool, queries: int, keys: int) -> list:
    """Of the segments along the lanes, for queries, and along the sublanes, for keys."""

    def index(size, axis):
        def at(b, c, i):
            block = i if size == BLOCK else 0
            return (b, 0, block) if axis == 2 else (b, block, 0)

        return at

    if not segmented:
        return []
    return [
        pl.BlockSpec((1, 1, queries), index(queries, 2)),
        pl.BlockSpec((1, keys, 1), index(keys, 1)),
    ]


def _segment_arguments(segments) -> list:
    return [] if segments is None else [segments[0][:, None, :], segments[1][:, :, None]]


def _cost(query, heads, columns, lanes, causal, products, arrays) -> pl.CostEstimate:
    """What is really done: whole blocks, and all lanes of each product."""
    batch, time, _ = query.shape
    blocks = time // BLOCK
    pairs = blocks * (blocks + 1) // 2 if causal else blocks**2
    scores = batch * columns * heads * pairs * BLOCK**2
    return pl.CostEstimate(
        flops=products * 2 * scores * lanes,
        transcendentals=scores,
        bytes_accessed=arrays * math.prod(query.shape) * query.dtype.itemsize,
    )
