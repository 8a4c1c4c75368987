"""Flash attention on a TPU, in Pallas (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

The matrix of scores is never in HBM: a block of queries is multiplied with one block of keys at a
time in the core's own memory, and the backward pass recomputes the scores from the softmax's
denominators. Blocks of keys that come after all queries of a block are skipped, and so are those
that a mask hides from all of them.

Layout: (batch, time, heads x head_dim), as the projections write it, split into columns of 128, the
lanes of a TPU. With head_dim 64 two heads share a column; a product for one sets the other to
zero in one factor, which is free, because the matrix unit works on 128 lanes anyway. Scores are
transposed, (keys, queries), so that the maxima and sums of queries lie along the lanes. Consecutive
columns of queries may share a column of keys (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245), which is read once for all of them.

Everything is float32 between reading and writing, because v2 and v3 support no bfloat16 product in
a kernel. Unless the arrays are float32, the matrix unit itself rounds factors to bfloat16.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK = 256  # queries processed at a time, and keys processed at a time
LONGEST = 8192  # longest sequence, in tokens: a column's keys and values must all fit into VMEM
# Largest time x head_dim for which float32 keys that heads share fit into 16 MiB of VMEM.
SHARED_FLOAT32 = 2048 * 128
HIDDEN = -1e9
VMEM = 64 * 2**20  # bytes of VMEM that the kernels may use
# Segments of the queries and of the keys, each (batch, time) int32.
Segments = tuple[jax.Array, jax.Array]
# Whether a key is seen by a query, (batch, time of keys, time of queries) int8; and whether any key
# of a block is seen by any query of a block, (batch, blocks of keys, blocks of queries) int32.
Mask = tuple[jax.Array, jax.Array]
# jax 0.7 renamed this class.
Parameters = getattr(pltpu, "CompilerParams", None) or pltpu.TPUCompilerParams  # pyright: ignore[reportAttributeAccessIssue]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    mask: Mask | None = None,
    *,
    head_dim: int,
    causal: bool,
    soft_cap: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention, and the logarithm of the softmax's denominator of each query and head.

    Args:
        query: (batch, time, columns x 128); time is a multiple of `BLOCK`.
        key: (batch, time, key columns x 128); as many columns as query has, or if a head fills a
            column, a divisor of that number.
        value: has the shape of key.
        segments: the segment ids of queries and of keys, each (batch, time) int32; a query sees
            only keys of the same segment. None: all keys.
        mask: a further limit on the keys that each query sees. None: no further limit.
        head_dim: the channels of a head, a divisor or a multiple of 128.
        causal: whether a query sees only keys up to its own position.
        soft_cap: bound of the scores, which become soft_cap x tanh(score / soft_cap); 0: none.
        interpret: whether to run on a CPU, with Pallas's interpreter.

    Returns:
        output: has the shape and dtype of query.
        log_sum: (batch, columns, heads per column, time), float32.
    """
    batch, time, width = query.shape
    lanes = max(LANES, head_dim)
    heads, columns, shared = lanes // head_dim, width // lanes, width // key.shape[2]
    limits = Limits(segments is not None, mask is not None)
    row = pl.BlockSpec((1, BLOCK, lanes), lambda b, c, i: (b, i, c))
    whole = pl.BlockSpec((1, time, lanes), lambda b, c, i: (b, 0, jax.lax.div(c, shared)))
    body = functools.partial(
        _forward_body,
        heads=heads,
        head_dim=head_dim,
        causal=causal,
        soft_cap=soft_cap,
        limits=limits,
    )
    return pl.pallas_call(
        body,
        grid=(batch, columns, time // BLOCK),
        in_specs=[row, whole, whole, *limits.build_specs(BLOCK, time)],
        out_specs=[row, pl.BlockSpec((1, 1, heads, BLOCK), lambda b, c, i: (b, c, 0, i))],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, columns, heads, time), jnp.float32),
        ],
        compiler_params=Parameters(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=_estimate_cost(query, key, head_dim, causal, products=2, queries=2, keys=2),
        interpret=interpret,
    )(query, key, value, *_list_limits(segments, mask))


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    mask: Mask | None,
    log_sum: jax.Array,
    output: jax.Array,
    upstream: jax.Array,
    *,
    head_dim: int,
    causal: bool,
    soft_cap: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients with respect to query, key and value.

    Args:
        query: see `forward`; the same for key, value, segments, mask, head_dim, causal, soft_cap
            and interpret.
        log_sum: the second result of `forward`.
        output: the first result of `forward`.
        upstream: the gradient with respect to the output, with query's shape.

    Returns:
        d_query: has the shape and dtype of query.
        d_key: has the shape and dtype of key.
        d_value: has the shape and dtype of value.
    """
    batch, time, width = query.shape
    lanes = max(LANES, head_dim)
    heads, columns, shared = lanes // head_dim, key.shape[2] // lanes, width // key.shape[2]
    limits = Limits(segments is not None, mask is not None)

    def done(b, c, member, i):  # gradients of keys are complete with the last head that shares them
        return (b, jnp.where(member == shared - 1, i, 0), c)

    row = pl.BlockSpec((1, BLOCK, lanes), lambda b, c, member, i: (b, i, c))
    whole = pl.BlockSpec((1, time, lanes), lambda b, c, member, i: (b, 0, c * shared + member))
    sums = pl.BlockSpec((1, 1, heads, time), lambda b, c, member, i: (b, c * shared + member, 0, 0))
    body = functools.partial(
        _backward_body,
        heads=heads,
        head_dim=head_dim,
        causal=causal,
        soft_cap=soft_cap,
        limits=limits,
    )
    of_keys = time if shared > 1 else BLOCK
    # float32 gradients are summed in the output itself, others in a separate float32 array.
    of_queries = BLOCK if query.dtype == jnp.float32 else time
    shift = _compute_shifts(output, upstream, head_dim, heads, interpret)
    return pl.pallas_call(
        body,
        grid=(batch, columns, shared, time // BLOCK),
        in_specs=[
            whole,
            row,
            row,
            whole,
            sums,
            sums,
            *limits.build_specs(time, BLOCK),
        ],
        out_specs=[whole, *(2 * [pl.BlockSpec((1, BLOCK, lanes), done)])],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)],
        scratch_shapes=[
            pltpu.VMEM((of_queries, lanes), jnp.float32),
            pltpu.VMEM((of_keys, lanes), jnp.float32),
            pltpu.VMEM((of_keys, lanes), jnp.float32),
        ],
        compiler_params=Parameters(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=_estimate_cost(query, key, head_dim, causal, products=5, queries=3, keys=4),
        interpret=interpret,
    )(query, key, value, upstream, log_sum, shift, *_list_limits(segments, mask))


def _forward_body(q_ref, k_ref, v_ref, *refs, heads, head_dim, causal, soft_cap, limits):
    seen, (out_ref, log_sum_ref) = limits.split(refs)
    block, product = pl.program_id(2), build_product(q_ref.dtype)
    query = q_ref[0].astype(jnp.float32) * head_dim**-0.5  # (BLOCK, lanes)
    output = jnp.zeros(query.shape, jnp.float32)
    for head in range(heads):
        mine = _mask_lanes(head, head_dim, query.shape)
        own = jnp.where(mine, query, 0) if heads > 1 else query

        def step(index, state, own=own, diagonal=False):
            largest, total, mixed = state
            at = pl.ds(pl.multiple_of(index * BLOCK, BLOCK), BLOCK)
            scores = product(k_ref[0, at, :].astype(jnp.float32), own, 1, 1)  # (keys, queries)
            scores = _cap_scores(scores, soft_cap)
            visible = seen.find_visible(at, slice(None), diagonal)
            scores = scores if visible is None else jnp.where(visible, scores, HIDDEN)
            new = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
            weight = jnp.exp(scores - new)
            kept = jnp.exp(largest - new)  # (1, queries)
            total = total * kept + jnp.sum(weight, axis=0, keepdims=True)
            mixed = mixed * kept + product(v_ref[0, at, :].astype(jnp.float32), weight, 0, 0)
            return new, total, mixed

        def visit(index, state, step=step, diagonal=False):
            run = functools.partial(step, index, diagonal=diagonal)
            return seen.run_unless_hidden(index, block, run, state)

        start = (
            jnp.full((1, BLOCK), -jnp.inf, jnp.float32),
            jnp.zeros((1, BLOCK), jnp.float32),
            jnp.zeros(query.shape[::-1], jnp.float32),  # (lanes, queries)
        )
        if causal:
            state = jax.lax.fori_loop(0, block, visit, start)
            largest, total, mixed = visit(block, state, diagonal=True)
        else:
            largest, total, mixed = jax.lax.fori_loop(0, k_ref.shape[1] // BLOCK, visit, start)
        if limits.masked:  # queries that see no keys return zeros instead of NaN
            largest, total = jnp.where(total == 0, 0.0, largest), jnp.where(total == 0, 1.0, total)
        output = jnp.where(mine, (mixed / total).T, output)
        log_sum_ref[0, 0, head, :] = (largest + jnp.log(total))[0]
    out_ref[0] = output.astype(out_ref.dtype)


def _backward_body(
    q_ref,
    k_ref,
    v_ref,
    up_ref,
    log_sum_ref,
    shift_ref,
    *refs,
    heads,
    head_dim,
    causal,
    soft_cap,
    limits,
):
    seen, (dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum) = limits.split(refs)
    member, block, product = pl.program_id(2), pl.program_id(3), build_product(q_ref.dtype)
    blocks, scale = q_ref.shape[1] // BLOCK, head_dim**-0.5
    dq_sum = dq_ref.at[0] if dq_ref.dtype == jnp.float32 else dq_sum

    @pl.when(block == 0)
    def _():
        dq_sum[...] = jnp.zeros(dq_sum.shape, jnp.float32)

    key, value = (ref[0].astype(jnp.float32) for ref in (k_ref, v_ref))  # (BLOCK, lanes)
    zeros = jnp.zeros(key.shape, jnp.float32)
    d_key, d_value = zeros, zeros
    for head in range(heads):
        mine = _mask_lanes(head, head_dim, key.shape)
        own_key, own_value = (jnp.where(mine, x, 0) if heads > 1 else x for x in (key, value))

        def step(
            index, state, own_key=own_key, own_value=own_value, head=head, mine=mine, diagonal=False
        ):
            d_key, d_value = state
            at = pl.ds(pl.multiple_of(index * BLOCK, BLOCK), BLOCK)
            query, up = (ref[0, at, :].astype(jnp.float32) for ref in (q_ref, up_ref))
            query = query * scale
            capped = _cap_scores(product(own_key, query, 1, 1), soft_cap)  # (keys, queries)
            visible = seen.find_visible(slice(None), at, diagonal)
            scores = capped if visible is None else jnp.where(visible, capped, HIDDEN)
            weight = jnp.exp(scores - log_sum_ref[0, 0, pl.ds(head, 1), at])
            d_value += product(weight, up, 1, 0)
            d_score = product(own_value, up, 1, 1)
            d_score = weight * (d_score - shift_ref[0, 0, pl.ds(head, 1), at])
            if soft_cap:
                d_score *= 1.0 - (capped / soft_cap) ** 2
            d_key += product(d_score, query, 1, 0)
            dq_sum[at, :] += product(d_score, own_key, 0, 0)
            return d_key, d_value

        def visit(index, state, step=step, diagonal=False):
            run = functools.partial(step, index, diagonal=diagonal)
            return seen.run_unless_hidden(block, index, run, state)

        state, first = (zeros, zeros), 0
        if causal:
            state, first = visit(block, state, diagonal=True), block + 1
        found = jax.lax.fori_loop(first, blocks, visit, state)
        d_key = jnp.where(mine, found[0], d_key)
        d_value = jnp.where(mine, found[1], d_value)
    for ref, sums, found in ((dk_ref, dk_sum, d_key), (dv_ref, dv_sum, d_value)):
        at = pl.ds(pl.multiple_of(block * BLOCK, BLOCK) if sums.shape[0] > BLOCK else 0, BLOCK)
        # Adds the gradients of the other heads that share these keys.
        found += jnp.where(member == 0, 0.0, sums[at, :])
        sums[at, :] = found
        ref[0] = found.astype(ref.dtype)

    @pl.when(block == blocks - 1)
    def _():
        dq_ref[0] = (dq_sum[...] * scale).astype(dq_ref.dtype)


def _compute_shifts(
    output: jax.Array, upstream: jax.Array, head_dim: int, heads: int, interpret: bool
) -> jax.Array:
    """Computes each head's sum of output x upstream, which the softmax's gradient subtracts.

    Args: as for `backward`, and
        heads: number of heads per column.

    Returns:
        (batch, columns, heads per column, time), float32.
    """
    batch, time, width = output.shape
    lanes = max(LANES, head_dim)
    row = pl.BlockSpec((1, BLOCK, lanes), lambda b, c, i: (b, i, c))

    def body(out_ref, up_ref, shift_ref):
        both = (out_ref[0].astype(jnp.float32) * up_ref[0].astype(jnp.float32)).T
        for head in range(heads):  # `both` is (lanes, queries)
            own = both[head * head_dim : (head + 1) * head_dim]
            shift_ref[0, 0, pl.ds(head, 1), :] = jnp.sum(own, axis=0, keepdims=True)

    return pl.pallas_call(
        body,
        grid=(batch, width // lanes, time // BLOCK),
        in_specs=[row, row],
        out_specs=pl.BlockSpec((1, 1, heads, BLOCK), lambda b, c, i: (b, c, 0, i)),
        out_shape=jax.ShapeDtypeStruct((batch, width // lanes, heads, time), jnp.float32),
        compiler_params=Parameters(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=0,  # the matrix unit computes nothing
            transcendentals=0,
            bytes_accessed=2 * output.size * output.dtype.itemsize,
        ),
        interpret=interpret,
    )(output, upstream)


def build_product(dtype: Any) -> Callable[..., jax.Array]:
    """Returns a function that multiplies float32 matrices as precisely as `dtype` needs."""
    # One pass of the matrix unit rounds to bfloat16. float32 takes several passes.
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


def _mask_lanes(head: int, head_dim: int, shape: tuple[int, ...]) -> jax.Array:
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (lane >= head * head_dim) & (lane < (head + 1) * head_dim)


def _cap_scores(scores: jax.Array, soft_cap: float) -> jax.Array:
    return soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores


class Limits(NamedTuple):
    """The kinds of limits, besides causality, on the keys that a query sees.

    Attributes:
        segmented: whether there are segments.
        masked: whether there is a mask.
    """

    segmented: bool
    masked: bool

    def build_specs(self, queries: int, keys: int) -> list[pl.BlockSpec]:
        """Returns the block specs of the arrays from `_list_limits`, for `pl.pallas_call`.

        Args:
            queries: number of queries that the kernel reads at a time: a block or all.
            keys: number of keys that the kernel reads at a time.
        """

        def at(size: int, others: tuple) -> Any:
            return others[-1] if size == BLOCK else 0

        specs = []
        if self.segmented:  # segments of queries along lanes, of keys along sublanes
            specs += [
                pl.BlockSpec((1, 1, queries), lambda b, c, *others: (b, 0, at(queries, others))),
                pl.BlockSpec((1, keys, 1), lambda b, c, *others: (b, at(keys, others), 0)),
            ]
        if self.masked:
            blocks = max(queries, keys) // BLOCK
            specs += [
                pl.BlockSpec(
                    (1, keys, queries),
                    lambda b, c, *others: (b, at(keys, others), at(queries, others)),
                ),
                pl.BlockSpec(
                    (1, blocks, blocks), lambda b, c, *_: (b, 0, 0), memory_space=pltpu.SMEM
                ),
            ]
        return specs

    def split(self, refs: Sequence[Any]) -> tuple["Seen", Sequence[Any]]:
        """Splits a kernel's references into those to `_list_limits`' arrays and the others."""
        segments, rest = (refs[:2], refs[2:]) if self.segmented else (None, refs)
        mask, rest = (rest[:2], rest[2:]) if self.masked else (None, rest)
        return Seen(segments, mask), rest


class Seen(NamedTuple):
    """References to the arrays that limit the keys that a query sees.

    Attributes:
        segments: the segment ids of queries and of keys; or None.
        mask: the two arrays of `Mask`; or None.
    """

    segments: Any
    mask: Any

    def find_visible(self, keys: Any, queries: Any, diagonal: bool) -> jax.Array | None:
        """Returns whether each query sees each key, (keys, queries) bool; None if all do.

        Args:
            keys: slice of the keys.
            queries: slice of the queries.
            diagonal: whether queries and keys have the same positions, and later keys are hidden.
        """
        found = []
        if diagonal:
            key, query = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), a) for a in (0, 1))
            found.append(key <= query)
        if self.segments is not None:
            of_queries, of_keys = self.segments
            found.append(of_keys[0, keys, :] == of_queries[0, :, queries])
        if self.mask is not None:
            found.append(self.mask[0][0, keys, queries].astype(jnp.int32) != 0)
        return functools.reduce(jnp.logical_and, found) if found else None

    def run_unless_hidden(self, keys: Any, queries: Any, run: Callable, state: Any) -> Any:
        """Returns `run(state)`, or `state` if the mask hides the keys from all the queries.

        Args:
            keys: index of the block of keys.
            queries: index of the block of queries.
            run: a function that maps the state to the next state.
            state: a nest of arrays.
        """
        if self.mask is None:
            return run(state)
        return jax.lax.cond(self.mask[1][0, keys, queries] != 0, run, lambda same: same, state)


def _list_limits(segments: Segments | None, mask: Mask | None) -> list[jax.Array]:
    of_segments = [] if segments is None else [segments[0][:, None, :], segments[1][:, :, None]]
    return [*of_segments, *(mask or ())]


def _estimate_cost(
    query: jax.Array,
    key: jax.Array,
    head_dim: int,
    causal: bool,
    products: int,
    queries: int,
    keys: int,
) -> pl.CostEstimate:
    """Returns a kernel's cost estimate, which counts whole blocks and all lanes.

    Args:
        query: see `forward`; the same for key, head_dim and causal.
        products: number of matrix products for each head and block of scores.
        queries: number of arrays of query's shape that are read or written.
        keys: number of arrays of key's shape that are read or written.
    """
    batch, time, width = query.shape
    blocks = time // BLOCK
    pairs = blocks * (blocks + 1) // 2 if causal else blocks**2
    scores = batch * (width // head_dim) * pairs * BLOCK**2
    return pl.CostEstimate(
        flops=products * 2 * scores * max(LANES, head_dim),
        transcendentals=scores,
        bytes_accessed=(queries * query.size + keys * key.size) * query.dtype.itemsize,
    )
