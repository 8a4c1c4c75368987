"""Causal self-attention over the tokens of a call, and of earlier calls if there is a cache."""

from tftpu import sharding
from tftpu.inference import cache
from tftpu.kernels.attention import HIDDEN, attention
from tftpu.tensors import Tensor, ops


def causal_attention(
    layer: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    implementation: str,
) -> Tensor:
    """Computes attention of each token to itself and to earlier ones of its segment.

    If a cache is open, keys and values are stored in it. Later calls then take the next tokens of
    each row; rows beyond the cached ones, which only pad the batch, get zeros.

    Args:
        layer: name of the layer, its key in the cache.
        query, key, value, implementation: as for `tftpu.kernels.attention.attention`.
        segments: `segment_ids` of `attention`; not used with a cache.
    """
    kept = cache.find_open_cache()
    if kept is not None and layer in kept.pairs:
        rows = kept.pairs[layer].keys.shape[0]
        pair = kept.extend(layer, key[:rows], value[:rows])
        found = _attend_kept(query[:rows], pair, kept.visible)
        return ops.pad(found, ((0, query.shape[0] - rows), (0, 0), (0, 0), (0, 0)))
    if kept is not None:
        kept.start(layer, key, value)
    return attention(
        query, key, value, causal=True, segment_ids=segments, implementation=implementation
    )


def _attend_kept(query: Tensor, pair: cache.Pair, visible: Tensor) -> Tensor:
    """Computes attention of the next tokens of each row to the cached tokens that they see.

    Args:
        query: (batch, time, heads, head_dim).
        pair: cached keys and values, each (batch, slots, key_heads * head_dim).
        visible: (batch, time, slots), bool.
    """
    batch, time, heads, head_dim = query.shape
    slots, width = pair.keys.shape[1:]
    key_heads = width // head_dim
    query = ops.reshape(query * head_dim**-0.5, (batch, time, key_heads, -1, head_dim))
    if time == 1 and sharding.get_platform() == "tpu":
        found = _as_one_product(query[:, 0], pair, visible)
        return ops.reshape(found, (batch, 1, heads, head_dim))
    keys, values = (ops.reshape(x, (batch, slots, key_heads, head_dim)) for x in pair)
    if time == 1:
        # A matrix product would first copy all keys and values, to bring their heads forward.
        scores = ops.sum(keys[:, :, :, None] * query, axis=-1)  # (batch, slots, key_heads, queries)
        weights = _compute_weights(scores, ops.transpose(visible, (0, 2, 1))[..., None], axis=1)
        found = ops.sum(weights[..., None] * values[:, :, :, None], axis=1)
    else:
        scores = ops.einsum("btgrd,bsgd->bgrts", query, keys)
        weights = _compute_weights(scores, visible[:, None, None])
        found = ops.einsum("bgrts,bsgd->btgrd", weights, values)
    return ops.reshape(found, (batch, time, heads, head_dim))


def _as_one_product(query: Tensor, pair: cache.Pair, visible: Tensor) -> Tensor:
    """Computes attention with one matrix product for all heads of a row.

    A product for each head has one query or a few, which do not fill a TPU's matrix unit. Here each
    query fills the columns of its head, and zeros fill those of the other heads. The products with
    zeros cost nothing, because the matrix unit would wait for memory meanwhile.

    Args:
        query: (batch, key_heads, queries, head_dim), scaled.
        pair: cached keys and values, each (batch, slots, key_heads * head_dim).
        visible: (batch, 1, slots), bool.
    """
    batch, key_heads, queries, head_dim = query.shape
    own = ops.eye(key_heads, dtype=query.dtype)  # (key_heads, key_heads)
    wide = query[:, :, :, None] * own[None, :, None, :, None]
    wide = ops.reshape(wide, (batch, key_heads * queries, key_heads * head_dim))
    weights = _compute_weights(ops.einsum("bqw,bsw->bqs", wide, pair.keys), visible)
    found = ops.einsum("bqs,bsw->bqw", weights, pair.values)
    found = ops.reshape(found, (batch, key_heads, queries, key_heads, head_dim))
    return ops.sum(found * own[None, :, None, :, None], axis=3)


def _compute_weights(scores: Tensor, visible: Tensor, axis: int = -1) -> Tensor:
    """Returns the softmax of scores over the visible slots, along the axis of the slots."""
    hidden = ops.where(visible, ops.cast(scores, "float32"), HIDDEN)
    return ops.cast(ops.softmax(hidden, axis=axis), scores.dtype)
