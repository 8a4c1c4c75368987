"""Flash attention for the layers of Keras and KerasHub, in programs for a TPU.

Most layers call `keras.ops.dot_product_attention`, which chooses a kernel for this machine's
devices. Its TPU kernel applies the first mask of a batch to all examples, and its other
implementations drop a soft cap. Here the program's target decides, and every mask is applied.
KerasHub computes attention with sinks in a method of a layer, which is replaced separately.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tftpu import sharding
from tftpu.errors import UserError
from tftpu.kernels import functions, jax_internals, keras_hub_internals
from tftpu.kernels.attention import attention
from tftpu.tensors import Tensor, ops


@contextlib.contextmanager
def attending_by_kernel() -> Iterator[None]:
    """Makes Keras and KerasHub compute attention with the module `flash` within the block, on JAX.

    Does nothing unless the program is for a TPU. `jax.devices()` lists one TPU in the block, for
    models that choose their attention by it.
    """
    if sharding.get_platform() != "tpu":
        yield
        return
    with (
        jax_internals.replacing_attention(attend),
        keras_hub_internals.replacing_sink_attention(attend_with_sinks),
        jax_internals.reporting_devices("tpu"),
    ):
        yield


def attend(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Tensor:
    """Computes attention as `keras.ops.dot_product_attention` documents it.

    Args:
        original: Keras's function, which is called if the kernel does not support the arguments.
        query, key, value, bias, mask, scale, is_causal, flash_attention, attn_logits_soft_cap: as
            for `keras.ops.dot_product_attention`.

    Raises:
        UserError: a soft cap with a bias, or with masks that differ by head.
    """
    limit = None if mask is None else _simplify_mask(mask, query.shape[0])
    ours = bias is None and (mask is None or limit is not None)
    if ours:
        runs = flash_attention is not False and functions.takes_attention(query, key)
        if runs or attn_logits_soft_cap:
            if scale is not None:  # undoes the scale of `attention`, head_dim**-0.5
                query = query * ops.cast(scale * query.shape[-1] ** 0.5, query.dtype)
            return attention(
                query,
                key,
                value,
                causal=is_causal,
                mask=limit,
                soft_cap=attn_logits_soft_cap or 0.0,
                implementation="flash" if runs else "plain",
            )
    if attn_logits_soft_cap:
        raise UserError(
            f"Attention with the soft cap {attn_logits_soft_cap} supports neither a bias nor masks "
            "that differ by head."
        )
    return original(query, key, value, bias, mask, scale, is_causal, flash_attention=False)


def attend_with_sinks(
    original: Callable[..., Tensor],
    sinks: Tensor,
    window: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    start_index: Any = 0,
) -> Tensor:
    """Computes attention with sinks, as KerasHub's GptOss does.

    Args:
        original: KerasHub's method, which is called if the kernel does not support the arguments,
            such as single queries while text is generated.
        sinks: see `attention`.
        window: how many keys before its own position a query sees; 0 or less: all.
        query, key, value: see `attention`.
        attention_mask: which keys each query sees, bool, broadcasts to (batch, time, key_time).
        start_index: the position of the first query among the keys.
    """
    if attention_mask is None or not functions.takes_attention(query, key):
        return original(query, key, value, attention_mask, start_index)
    places = ops.arange(query.shape[1])
    near = places[None] >= places[:, None] - window if window > 0 else True
    mask = ops.logical_and(ops.cast(attention_mask, "bool"), near)
    mask = _simplify_mask(mask, query.shape[0])
    return attention(query, key, value, mask=mask, sinks=sinks, implementation="flash")


def _simplify_mask(mask: Tensor, batch: int) -> Tensor | None:
    """Returns a mask in the form that `attention` takes; None if it may differ by head.

    Args:
        mask: (batch, time, key_time), or 4 dimensions that broadcast to (batch, heads, time,
            key_time).
        batch: number of examples.
    """
    mask = mask[:, None] if len(mask.shape) == 3 else mask
    if len(mask.shape) != 4 or mask.shape[1] != 1:
        return None
    mask = ops.broadcast_to(mask[:, 0], (batch, *mask.shape[2:]))
    return mask[:, 0] if mask.shape[1] == 1 else mask
