"""Attention by its plain definition, or by a kernel that never writes the scores down."""

from typing import Any

from keras import ops

from tftpu.models.sizes import check_attention

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
        implementation: "plain" or "flash".

    Returns:
        (batch, time, heads, head_dim), in `query`'s dtype. The softmax is taken in float32 whatever
        that is. A query that sees no key gets an arbitrary finite value.

    Raises:
        UserError: an unknown implementation.
    """
    check_attention(implementation)
    batch, time, heads, head_dim = ops.shape(query)
    key_time, key_heads = ops.shape(key)[1:3]
    query = ops.reshape(query * head_dim**-0.5, (batch, time, key_heads, -1, head_dim))
    scores = ops.cast(ops.einsum("btgrd,bsgd->bgrts", query, key), "float32")
    visible = _visible(time, key_time, causal, segment_ids, mask)
    if visible is not None:
        scores = ops.where(visible, scores, _HIDDEN)
    weights = ops.cast(ops.softmax(scores), value.dtype)
    mixed = ops.einsum("bgrts,bsgd->btgrd", weights, value)
    return ops.reshape(mixed, (batch, time, heads, head_dim))


def _visible(time: Any, key_time: Any, causal: bool, segment_ids: Any, mask: Any) -> Any:
    """Which keys a query sees: bool, broadcast to (batch, key_heads, shared, time, key_time)."""
    visible = None

    def narrow(condition):
        return condition if visible is None else ops.logical_and(visible, condition)

    if causal:
        visible = ops.arange(time)[:, None] >= ops.arange(key_time)[None, :]
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = narrow(same[:, None, None])
    if mask is not None:
        visible = narrow(ops.cast(mask, "bool")[:, None, None, None, :])
    return visible
