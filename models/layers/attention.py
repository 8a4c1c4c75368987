"""Attention by its plain definition, or by a kernel that never writes the scores down."""

from collections.abc import Callable
from typing import Any

from keras import ops

from tftpu.models import checks
from tftpu.tpu import target

BLOCKS = 4  # of queries, where none sees a key behind its block: 5/8 of the scores are left
LANES = 128  # of a TPU: blocks that are no multiple of it cost more than they save
_HIDDEN = -1e9  # a score that no softmax sees; finite, so that a row without keys stays finite


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    segment_ids: Any = None,
    mask: Any = None,
    implementation: str = "plain",
) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    Args:
        query: (batch, time, heads, head_dim), float.
        key, value: (batch, key_time, key_heads, head_dim). Fewer heads than `query`'s are each
            shared by heads / key_heads consecutive ones (Ainslie et al. 2023,
            https://arxiv.org/abs/2305.13245).
        causal: a query sees the keys up to its own position; `time` is `key_time` then.
        segment_ids: (batch, time), int: a query sees the keys of its own segment, as for several
            texts packed into one sequence; `time` is `key_time` then.
        mask: (batch, key_time), bool: False are keys that no query sees, as padding.
        implementation: "plain", or "flash": on a TPU the kernel of `tftpu.models.kernels.flash`,
            which writes no scores to memory, and the plain way elsewhere, where there is no such
            kernel. It needs jax beside TensorFlow (on a TPU VM: `tftpu[tpu]` brings the one
            that fits), and at most 8,192 tokens.

    Returns:
        (batch, time, heads, head_dim), in `query`'s dtype. The softmax is taken in float32 whatever
        that is. A query that sees no key gets an arbitrary finite value.

    Raises:
        UserError: an unknown implementation; flash attention on a TPU without jax, or of shapes
            that it does not take.
    """
    checks.attention(implementation)
    head_dim, key_heads = query.shape[-1], key.shape[2]
    shape = ops.shape(query)
    if _has_kernel(implementation) and all(isinstance(size, int) for size in shape):
        from tftpu.models.kernels import tensorflow_ops

        query = query * head_dim**-0.5
        return tensorflow_ops.flash_attention(query, key, value, causal, segment_ids, mask)
    query = ops.reshape(query * head_dim**-0.5, (*shape[:2], key_heads, -1, head_dim))
    mixed = _plain(query, key, value, causal, segment_ids, mask)
    return ops.reshape(mixed, shape)


def attention_by_heads(
    query: Any, key: Any, value: Any, *, segment_ids: Any = None, implementation: str = "plain"
) -> Any:
    """`attention` of every token to all, or to all of its segment, laid out head after head.

    Args:
        query, key, value: (batch, heads, time, head_dim), float.
        segment_ids, implementation: as of `attention`.

    Returns:
        As `query`.
    """
    checks.attention(implementation)
    if implementation == "flash":
        by_time = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
        found = attention(*by_time, segment_ids=segment_ids, implementation=implementation)
        return ops.transpose(found, (0, 2, 1, 3))
    visible = None
    if segment_ids is not None:
        visible = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return _plain_by_heads(query * query.shape[-1] ** -0.5, key, value, visible)


def _plain_by_heads(query, key, value, visible):
    """As `_plain`, of queries that may see any key: at once, and without its grouped keys."""

    def scores(query, key):
        found = ops.cast(ops.einsum("bhtd,bhsd->bhts", query, key), "float32")
        return found if visible is None else ops.where(visible, found, _HIDDEN)

    @ops.custom_gradient
    def attend(query, key, value):
        score = scores(query, key)
        largest = ops.max(score, axis=-1, keepdims=True)
        weight = ops.exp(score - largest)
        total = ops.sum(weight, axis=-1, keepdims=True)
        mixed = ops.einsum("bhts,bhsd->bhtd", ops.cast(weight, value.dtype), value)
        output = ops.cast(ops.cast(mixed, "float32") / total, value.dtype)
        log_sum = largest + ops.log(total)

        def gradient(upstream):
            shift = ops.cast(upstream, "float32") * ops.cast(output, "float32")
            shift = ops.sum(shift, axis=-1, keepdims=True)
            weight = ops.exp(scores(query, key) - log_sum)
            of_weight = ops.einsum("bhtd,bhsd->bhts", upstream, value)
            of_score = weight * (ops.cast(of_weight, "float32") - shift)
            of_score = ops.cast(of_score, query.dtype)
            weight = ops.cast(weight, value.dtype)
            return (
                ops.einsum("bhts,bhsd->bhtd", of_score, key),
                ops.einsum("bhts,bhtd->bhsd", of_score, query),
                ops.einsum("bhts,bhtd->bhsd", weight, upstream),
            )

        return output, gradient

    return attend(query, key, value)


def whole_sequences(implementation: str, x: Any, heads: int) -> Callable | None:
    """The kernel for self-attention over short sequences, where it can be used: on v2 and v3, too.

    Args:
        implementation: of `attention`; only "flash" has such a kernel, and only on a TPU.
        x: the tokens, (batch, time, width); every one attends to all, or to its own segment.
        heads: of the width.

    Returns:
        `tftpu.models.kernels.tensorflow_ops.whole_attention`, or None: `attention` it is.
    """
    checks.attention(implementation)
    if _has_kernel(implementation):
        from tftpu.models.kernels import tensorflow_ops

        if tensorflow_ops.takes_whole(x, heads):
            return tensorflow_ops.whole_attention
    return None


def _has_kernel(implementation: str) -> bool:
    return implementation == "flash" and target.platform() == "tpu"


def _plain(query, key, value, causal: bool, segment_ids, mask):
    """Attention whose gradient keeps no matrix of scores: it computes them again, block by block.

    What is kept is the output and, for each query, the logarithm of its softmax's denominator (as
    Dao et al. 2022, https://arxiv.org/abs/2205.14135). Scores and probabilities lie in memory in
    the compute dtype; what is done with them is done in float32.
    """

    time, key_time = ops.shape(query)[1], ops.shape(key)[1]
    cut = causal and isinstance(time, int) and time % (BLOCKS * LANES) == 0

    def blocks():
        """Slices of queries and of the keys that they can see, and which of these they do."""
        size = time // BLOCKS if cut else None
        for index in range(BLOCKS if cut else 1):
            rows = slice(index * size, (index + 1) * size) if cut else slice(None)
            seen = slice(rows.stop if causal else None)
            yield rows, seen, _visible(time, key_time, rows, seen, causal, segment_ids, mask)

    def scores(query, key, rows, seen, visible):
        found = ops.cast(ops.einsum("btgrd,bsgd->bgrts", query[:, rows], key[:, seen]), "float32")
        return found if visible is None else ops.where(visible, found, _HIDDEN)

    @ops.custom_gradient
    def attend(query, key, value):
        values = _with_ones(value) if cut else value
        outputs, log_sums = [], []
        for rows, seen, visible in blocks():
            score = scores(query, key, rows, seen, visible)
            largest = ops.max(score, axis=-1, keepdims=True)
            weight = ops.exp(score - largest)
            mixed, total = _mixed(weight, values[:, seen], value.shape[-1])
            outputs.append(ops.cast(mixed / total, value.dtype))
            total = ops.transpose(total, (0, 2, 3, 1, 4))  # (batch, key_heads, shared, time, 1)
            log_sums.append(largest + ops.log(total))
        output = _joined(outputs, 1)

        def gradient(*upstream):
            (upstream,) = upstream
            # What the softmax's gradient takes off each row: sum(weight * its gradient).
            shift = ops.cast(upstream, "float32") * ops.cast(output, "float32")
            shift = ops.transpose(ops.sum(shift, axis=-1, keepdims=True), (0, 2, 3, 1, 4))
            queries, keys, values = [], [], []
            for (rows, seen, visible), log_sum in zip(blocks(), log_sums):
                weight = ops.exp(scores(query, key, rows, seen, visible) - log_sum)
                up = upstream[:, rows]
                of_weight = ops.einsum("btgrd,bsgd->bgrts", up, value[:, seen])
                of_score = weight * (ops.cast(of_weight, "float32") - shift[:, :, :, rows])
                of_score = ops.cast(of_score, query.dtype)
                weight = ops.cast(weight, value.dtype)
                values.append(ops.einsum("bgrts,btgrd->bsgd", weight, up))
                queries.append(ops.einsum("bgrts,bsgd->btgrd", of_score, key[:, seen]))
                keys.append(ops.einsum("bgrts,btgrd->bsgd", of_score, query[:, rows]))
            return _joined(queries, 1), _summed(keys), _summed(values)

        return output, gradient

    return attend(query, key, value)


def _with_ones(value):
    """The values with a one beside them, in float32, if that fills a lane that would be empty.

    Their product with the weights gives the weights' sum too, and saves a pass over the weights.
    Times that are no multiple of the lanes would have to be laid out anew: it is not for those.
    """
    if value.shape[-1] % LANES == 0:
        return value
    return ops.cast(ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1), "float32")


def _mixed(weight, value, head_dim: int):
    """The values by their weights, and the sums of the weights, in float32.

    Args:
        weight: (batch, key_heads, shared, time, key_time), float32.
        value: (batch, key_time, key_heads, head_dim), or as `_with_ones` gives it.

    Returns:
        (batch, time, key_heads, shared, head_dim), and the same with 1 for head_dim.
    """
    if value.shape[-1] > head_dim:
        mixed = ops.einsum("bgrts,bsgd->btgrd", weight, value)
        return mixed[..., :-1], mixed[..., -1:]
    total = ops.sum(weight, axis=-1, keepdims=True)
    mixed = ops.einsum("bgrts,bsgd->btgrd", ops.cast(weight, value.dtype), value)
    return ops.cast(mixed, "float32"), ops.transpose(total, (0, 3, 1, 2, 4))


def _joined(parts: list, axis: int):
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=axis)


def _summed(parts: list):
    """The sum of arrays of which each is longer than the last along the time: (batch, time, …)."""
    total = ops.cast(parts[-1], "float32")
    for part in parts[:-1]:
        rest = total.shape[1] - part.shape[1]
        total += ops.cast(ops.pad(part, ((0, 0), (0, rest), (0, 0), (0, 0))), "float32")
    return ops.cast(total, parts[0].dtype)


def _visible(time, key_time, rows: slice, seen: slice, causal: bool, segment_ids, mask):
    """Which keys a query sees: bool, broadcast to (batch, key_heads, shared, time, key_time)."""
    visible = None

    def narrow(condition):
        return condition if visible is None else ops.logical_and(visible, condition)

    if causal:
        visible = ops.arange(time)[rows, None] >= ops.arange(key_time)[None, seen]
    if segment_ids is not None:
        same = segment_ids[:, rows, None] == segment_ids[:, None, seen]
        visible = narrow(same[:, None, None])
    if mask is not None:
        visible = narrow(ops.cast(mask, "bool")[:, None, None, None, seen])
    return visible
