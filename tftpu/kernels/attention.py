"""Attention, computed directly or by a kernel that never writes the scores to memory."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras

from tftpu import sharding
from tftpu.errors import UserError, did_you_mean
from tftpu.kernels import ATTENTIONS
from tftpu.tensors import Tensor, ops

# Number of blocks of causal queries. Keys after a block are skipped: 5/8 of the scores remain.
BLOCKS = 4
LANES = 128  # lanes of a TPU; blocks of a size that is not a multiple cost more than they save
HIDDEN = -1e9  # the score of a hidden key; finite, so that a row without keys stays finite


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    segment_ids: Tensor | None = None,
    mask: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    implementation: str = "plain",
) -> Tensor:
    """Computes scaled dot-product attention (Vaswani et al. 2017).

    Follows https://arxiv.org/abs/1706.03762.

    Args:
        query: (batch, time, heads, head_dim), float.
        key: (batch, key_time, key_heads, head_dim). If there are fewer heads than in `query`, each
            is shared by heads / key_heads consecutive query heads (Ainslie et al. 2023,
            https://arxiv.org/abs/2305.13245).
        value: has the shape of key.
        causal: whether a query sees only keys up to its own position; needs time == key_time.
        segment_ids: (batch, time), int: a query sees only keys of the same segment, as for several
            documents packed into one sequence; needs time == key_time.
        mask: (batch, key_time), bool: False for keys that no query sees, such as padding; or
            (batch, time, key_time): which keys each query sees, such as those of a window.
        soft_cap: bound of the scores, which become soft_cap x tanh(score / soft_cap); 0: no bound
            (Gemma Team 2024, https://arxiv.org/abs/2408.00118).
        sinks: (heads,): the score of one more key, whose value is zero, for the queries of each
            head (OpenAI 2025, https://arxiv.org/abs/2508.10925). None: no such key.
        implementation: "plain"; "flash", the kernel of `tftpu.kernels.flash`, which writes no
            scores to memory; or "auto", which is "flash" if every TPU supports the shapes and it
            costs less, otherwise "plain". The kernel runs only on TPUs; elsewhere "flash" is the
            same as "plain", with a warning if the backend is neither TensorFlow nor JAX. It takes
            at most 8,192 tokens, or 16,384 per device if causal attention is sharded over time.
            Under TensorFlow it needs jax; the extra `tpu` installs a compatible version.

    Returns:
        (batch, time, heads, head_dim), in `query`'s dtype. The softmax is always in float32.
        A query that sees no key gets an arbitrary finite value.

    Raises:
        UserError: an unknown implementation; or flash attention on a TPU without jax, or with
            shapes that it does not support.
    """
    _check_implementation(implementation)
    head_dim, key_heads = query.shape[-1], key.shape[2]
    shape = ops.shape(query)
    static = all(isinstance(size, int) for size in shape)
    if static and _chooses_kernel(implementation, shape[1], head_dim, causal):
        from tftpu.kernels import functions

        is_taken = implementation == "flash"  # then `flash_attention` rejects unsupported shapes
        if is_taken or functions.find_refusal(query, key, causal, mask, soft_cap) is None:
            return functions.flash_attention(
                query, key, value, causal, segment_ids, mask, soft_cap, sinks
            )
    query = ops.reshape(query * head_dim**-0.5, (*shape[:2], key_heads, -1, head_dim))
    sees = Sight(causal, segment_ids, mask)
    if sinks is not None:
        sinks = ops.reshape(ops.cast(sinks, "float32"), (1, key_heads, -1, 1, 1))
    mixed = _attend_by_blocks(query, key, value, sees, soft_cap, sinks)
    return ops.reshape(mixed, shape)


def attention_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_ids: Tensor | None = None,
    implementation: str = "plain",
) -> Tensor:
    """Computes non-causal `attention`, within segments, for arrays with heads before time.

    Args:
        query: (batch, heads, time, head_dim), float.
        key: has the shape of query.
        value: has the shape of query.
        segment_ids: see `attention`.
        implementation: see `attention`.

    Returns:
        (batch, heads, time, head_dim), in `query`'s dtype.
    """
    _check_implementation(implementation)
    if _chooses_kernel(implementation, query.shape[2], query.shape[3]):
        by_time = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
        found = attention(*by_time, segment_ids=segment_ids, implementation=implementation)
        return ops.transpose(found, (0, 2, 1, 3))
    return _attend_by_heads(query * query.shape[-1] ** -0.5, key, value, segment_ids)


def _attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None
) -> Tensor:
    """Computes non-causal attention in one block; the backward pass recomputes the scores."""

    def compute_scores(query, key):
        found = ops.cast(ops.einsum("bhtd,bhsd->bhts", query, key), "float32")
        if segment_ids is None:
            return found
        # Computed in each call, because in a loop JAX's gradient cannot see a mask that the forward
        # pass made.
        visible = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return ops.where(visible, found, HIDDEN)

    @ops.custom_gradient
    def attend(query, key, value):
        score = compute_scores(query, key)
        largest = ops.max(score, axis=-1, keepdims=True)
        weight = ops.exp(score - largest)
        total = ops.sum(weight, axis=-1, keepdims=True)
        mixed = ops.einsum("bhts,bhsd->bhtd", ops.cast(weight, value.dtype), value)
        output = ops.cast(ops.cast(mixed, "float32") / total, value.dtype)
        log_sum = largest + ops.log(total)

        def gradient(upstream):
            shift = ops.cast(upstream, "float32") * ops.cast(output, "float32")
            shift = ops.sum(shift, axis=-1, keepdims=True)
            weight = ops.exp(compute_scores(query, key) - log_sum)
            d_weight = ops.einsum("bhtd,bhsd->bhts", upstream, value)
            d_score = weight * (ops.cast(d_weight, "float32") - shift)
            d_score = ops.cast(d_score, query.dtype)
            weight = ops.cast(weight, value.dtype)
            return (
                ops.einsum("bhts,bhsd->bhtd", d_score, key),
                ops.einsum("bhts,bhtd->bhsd", d_score, query),
                ops.einsum("bhts,bhtd->bhsd", weight, upstream),
            )

        return output, gradient

    return attend(query, key, value)


def choose_rotation_kernel(
    implementation: str, x: Tensor, heads: int
) -> Callable[..., Tensor] | None:
    """Returns the kernel for rotary positions if it can be used, or None.

    Args:
        implementation: see `attention`; the kernel is not used for "plain", nor without a TPU.
        x: heads side by side, (batch, time, width).
        heads: number of heads in the width.

    Returns:
        `tftpu.kernels.functions.rotate_pairs`; None if plain ops are to be used.
    """
    if _chooses_kernel(implementation, x.shape[1], x.shape[2] // heads, causal=True):
        from tftpu.kernels import functions

        if functions.takes_rotation(x, heads):
            return functions.rotate_pairs
    return None


def choose_whole_kernel(implementation: str, x: Tensor, heads: int) -> Callable[..., Tensor] | None:
    """Returns the kernel for self-attention over short sequences if it can be used, or None.

    Args:
        implementation: see `attention`; the kernel is not used for "plain", nor without a TPU. It
            also runs on TPU v2 and v3.
        x: tokens, (batch, time, width), that each attend to all, or to their own segment.
        heads: number of heads in the width.

    Returns:
        `tftpu.kernels.functions.whole_attention`; None if `attention` is to be used.
    """
    _check_implementation(implementation)
    if _has_kernel(implementation):
        from tftpu.kernels import functions

        if functions.takes_whole(x, heads):
            return functions.whole_attention
    return None


def _check_implementation(implementation: str) -> None:
    if implementation not in ATTENTIONS:
        raise UserError(
            f"There is no attention {implementation!r}.{did_you_mean(implementation, ATTENTIONS)}"
        )


def _chooses_kernel(
    implementation: str, time: int | None, head_dim: int, causal: bool = False
) -> bool:
    """Returns whether to use the kernel `flash`, provided that it supports the shapes."""
    if not _has_kernel(implementation):
        return False
    from tftpu.kernels import functions

    return implementation == "flash" or functions.is_cheaper(time, head_dim, causal)


def _has_kernel(implementation: str) -> bool:
    """Returns whether the traced program may contain kernels; warns if `flash` never can."""
    backend = keras.config.backend()
    if implementation == "flash" and backend not in ("tensorflow", "jax"):
        warnings.warn(
            "model.attention='flash' computes plain attention here, because its kernel works "
            f"only under TensorFlow and JAX, but Keras runs on {backend}.",
            stacklevel=2,
        )
    if implementation == "plain" or backend not in ("tensorflow", "jax"):
        return False
    if sharding.get_platform() != "tpu":
        return False
    from tftpu.kernels import functions

    return implementation == "flash" or functions.has_kernels()


class Sight(NamedTuple):
    """Rules for which keys a query sees; `attention` describes the attributes."""

    causal: bool
    segment_ids: Tensor | None
    mask: Tensor | None

    def find_visible(self, time: int, key_time: int, rows: slice, seen: slice) -> Tensor | None:
        """Returns the mask of the keys in `seen` for the queries in `rows`; None if all are seen.

        The mask is bool, and broadcasts to (batch, key_heads, shared, time, key_time).
        """
        visible = None

        def narrow(condition: Tensor) -> Tensor:
            return condition if visible is None else ops.logical_and(visible, condition)

        if self.causal:
            visible = ops.arange(time)[rows, None] >= ops.arange(key_time)[None, seen]
        if self.segment_ids is not None:
            same = self.segment_ids[:, rows, None] == self.segment_ids[:, None, seen]
            visible = narrow(same[:, None, None])
        if self.mask is not None:
            mask = ops.cast(self.mask, "bool")
            pairwise = len(mask.shape) == 3
            mask = mask[:, rows, seen] if pairwise else mask[:, None, seen]
            visible = narrow(mask[:, None, None])
        return visible


def _attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Sight,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention whose backward pass recomputes the scores, block by block.

    The forward pass keeps only the output and, for each query, the logarithm of its softmax's
    denominator (as in Dao et al. 2022, https://arxiv.org/abs/2205.14135). Scores and probabilities
    are stored in the compute dtype; arithmetic on them is in float32.

    Args:
        query: scaled, (batch, time, key_heads, shared, head_dim).
        key, value, soft_cap: as for `attention`.
        sees: the rules for which keys a query sees.
        sinks: (1, key_heads, shared, 1, 1), float32; or None.
    """

    time, key_time = ops.shape(query)[1], ops.shape(key)[1]
    cut = sees.causal and isinstance(time, int) and time % (BLOCKS * LANES) == 0

    def iterate_blocks():
        """Yields slices of queries, slices of the keys they may see, and masks of these keys."""
        size = time // BLOCKS if cut else 0
        for index in range(BLOCKS if cut else 1):
            rows = slice(index * size, (index + 1) * size) if cut else slice(None)
            seen = slice(rows.stop if sees.causal else None)
            yield rows, seen, sees.find_visible(time, key_time, rows, seen)

    def compute_scores(query, key, rows, seen, visible):
        found = ops.cast(ops.einsum("btgrd,bsgd->bgrts", query[:, rows], key[:, seen]), "float32")
        found = soft_cap * ops.tanh(found / soft_cap) if soft_cap else found
        return found if visible is None else ops.where(visible, found, HIDDEN)

    @ops.custom_gradient
    def attend(query, key, value, *sinks):
        values = _append_ones(value) if cut else value
        outputs, log_sums = [], []
        for rows, seen, visible in iterate_blocks():
            score = compute_scores(query, key, rows, seen, visible)
            largest = ops.max(score, axis=-1, keepdims=True)
            for sink in sinks:
                largest = ops.maximum(largest, sink)
            weight = ops.exp(score - largest)
            mixed, total = _mix_values(weight, values[:, seen], value.shape[-1])
            for sink in sinks:
                total += ops.transpose(ops.exp(sink - largest), (0, 3, 1, 2, 4))
            outputs.append(ops.cast(mixed / total, value.dtype))
            total = ops.transpose(total, (0, 2, 3, 1, 4))  # (batch, key_heads, shared, time, 1)
            log_sums.append(largest + ops.log(total))
        output = _join_parts(outputs, 1)

        def gradient(*upstream):
            (upstream,) = upstream
            # The softmax's gradient subtracts sum(weight * d_weight) from each row.
            shift = ops.cast(upstream, "float32") * ops.cast(output, "float32")
            shift = ops.transpose(ops.sum(shift, axis=-1, keepdims=True), (0, 2, 3, 1, 4))
            queries, keys, values = [], [], []
            d_sinks = [ops.zeros_like(sink) for sink in sinks]
            for (rows, seen, visible), log_sum in zip(iterate_blocks(), log_sums):
                score = compute_scores(query, key, rows, seen, visible)
                weight = ops.exp(score - log_sum)
                up = upstream[:, rows]
                d_weight = ops.einsum("btgrd,bsgd->bgrts", up, value[:, seen])
                d_score = weight * (ops.cast(d_weight, "float32") - shift[:, :, :, rows])
                if soft_cap:  # hidden scores exceed the cap, but their weights are zero
                    d_score *= 1 - ops.square(ops.minimum(ops.abs(score) / soft_cap, 1.0))
                d_score = ops.cast(d_score, query.dtype)
                d_sinks = [
                    d_sink - ops.sum(ops.exp(sink - log_sum) * shift[:, :, :, rows], (0, 3), True)
                    for d_sink, sink in zip(d_sinks, sinks)
                ]
                weight = ops.cast(weight, value.dtype)
                values.append(ops.einsum("bgrts,btgrd->bsgd", weight, up))
                queries.append(ops.einsum("bgrts,bsgd->btgrd", d_score, key[:, seen]))
                keys.append(ops.einsum("bgrts,btgrd->bsgd", d_score, query[:, rows]))
            return _join_parts(queries, 1), _sum_padded(keys), _sum_padded(values), *d_sinks

        return output, gradient

    return attend(query, key, value, *([] if sinks is None else [sinks]))


def _append_ones(value: Tensor) -> Tensor:
    """Appends a one to each value, in float32, if that fills a TPU lane that would be empty.

    Their product with the weights then also gives the sum of the weights, which saves a pass over
    the weights. Use it only if the time is a multiple of 128; otherwise it would need a copy.
    """
    if value.shape[-1] % LANES == 0:
        return value
    return ops.cast(ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1), "float32")


def _mix_values(weight: Tensor, value: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns the weighted sums of values, and the sums of the weights, in float32.

    Args:
        weight: (batch, key_heads, shared, time, key_time), float32.
        value: (batch, key_time, key_heads, head_dim), or the result of `_append_ones`.
        head_dim: size of a value.

    Returns:
        mixed: (batch, time, key_heads, shared, head_dim).
        total: (batch, time, key_heads, shared, 1).
    """
    if value.shape[-1] > head_dim:
        mixed = ops.einsum("bgrts,bsgd->btgrd", weight, value)
        return mixed[..., :-1], mixed[..., -1:]
    total = ops.sum(weight, axis=-1, keepdims=True)
    mixed = ops.einsum("bgrts,bsgd->btgrd", ops.cast(weight, value.dtype), value)
    return ops.cast(mixed, "float32"), ops.transpose(total, (0, 3, 1, 2, 4))


def _join_parts(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=axis)


def _sum_padded(parts: list[Tensor]) -> Tensor:
    """Returns the sum of arrays of growing length, (batch, time, ...), padded with zeros."""
    total = ops.cast(parts[-1], "float32")
    for part in parts[:-1]:
        rest = total.shape[1] - part.shape[1]
        total += ops.cast(ops.pad(part, ((0, 0), (0, rest), (0, 0), (0, 0))), "float32")
    return ops.cast(total, parts[0].dtype)
