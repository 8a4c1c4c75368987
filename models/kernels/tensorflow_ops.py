"""The kernels as TensorFlow functions: jax2tf makes a JAX function an op of the graph."""

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tftpu import installation
from tftpu.errors import UserError
from tftpu.models.kernels import internals
from tftpu.tensors import Tensor, ops
from tftpu.tpu import target

# Its annotation claims that a decorated function returns what the plain one does.
_custom_gradient: Any = tf.custom_gradient


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    segment_ids: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Computes `tftpu.models.layers.attention.attention` by the kernel `flash`.

    Args: as for `attention`, with a scaled query and static shapes.

    Raises:
        UserError: jax is missing, or the kernel does not support these shapes.
    """
    flash = _kernel()
    batch, time, heads, head_dim = query.shape
    if key.shape[1] != time:
        raise UserError(
            f"model.attention='flash' needs as many keys as queries, not {key.shape[1]} and "
            f"{time}: use model.attention='plain'."
        )
    if time > flash.LONGEST or (flash.LANES % head_dim and head_dim % flash.LANES):
        raise UserError(
            f"model.attention='flash' takes up to {flash.LONGEST} tokens and heads of 64, 128 or "
            f"256, not {time} tokens and heads of {head_dim}: use model.attention='plain'."
        )
    if key.shape[2] != heads:  # the gradient of the repetition sums over queries that share a key
        key, value = (ops.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    segments = _segments(batch, time, segment_ids, mask, -time % flash.BLOCK)
    column = max(flash.LANES // head_dim, 1)  # heads

    def columns(x):  # (batch, time, heads, head_dim) -> (batch, blocks, columns x 128)
        x = ops.pad(x, ((0, 0), (0, -time % flash.BLOCK), (0, -heads % column), (0, 0)))
        return ops.reshape(x, (*x.shape[:2], -1))

    run = {"head_dim": head_dim, "causal": causal}
    attend = _with_gradient(
        _in_graph(functools.partial(flash.forward, **run)),
        _in_graph(functools.partial(flash.backward, **run)),
        segments,
        head_dim,
    )
    found = attend(columns(query), columns(key), columns(value))
    return ops.reshape(found, (*found.shape[:2], -1, head_dim))[:, :time, :heads]


def takes_whole(x: Any, heads: int) -> bool:
    """Returns whether `whole_attention` can be used for tokens, (batch, time, width).

    Raises:
        UserError: on a TPU, jax is missing.
    """
    if target.platform() != "tpu" or not all(isinstance(size, int) for size in x.shape):
        return False
    _kernel()
    from tftpu.models.kernels import whole

    _, time, width = x.shape
    return whole.takes(time, width, heads, tf.as_dtype(x.dtype).size)


def whole_attention(
    product: Tensor, bias: Any, heads: int, segment_ids: Tensor | None = None
) -> Tensor:
    """Computes self-attention over short sequences, from the projection to queries, keys, values.

    Args:
        product: (batch, time, 3 x width): the projection without its bias.
        bias: (3 x width,), a tensor or variable. The kernel sums its gradient along with that of
            `product`.
        heads: number of heads in the width.
        segment_ids: as for `tftpu.models.layers.attention.attention`.

    Returns:
        (batch, time, width), of `product`'s dtype.
    """
    from tftpu.models.kernels import whole

    batch, time, width = product.shape
    segments = _segments(batch, time, segment_ids, None, 0) or None
    head_dim = width // 3 // heads
    forward = _in_graph(functools.partial(whole.forward, head_dim=head_dim))
    backward = _in_graph(functools.partial(whole.backward, head_dim=head_dim))

    @_custom_gradient
    def attend(product, bias):
        qkv = product + bias

        def gradient(upstream):
            d_qkv, sums = backward(qkv, segments, upstream)
            return d_qkv, tf.cast(tf.reduce_sum(sums, (0, 1)), bias.dtype)

        return forward(qkv, segments), gradient

    return attend(product, tf.convert_to_tensor(bias))


def _segments(
    batch: int, time: int, segment_ids: Tensor | None, mask: Tensor | None, padding: int
) -> list[Tensor]:
    """Returns segments of queries and of keys, (batch, time) int32; [] if all keys are seen."""
    if segment_ids is None and mask is None and not padding:
        return []
    queries = tf.zeros((batch, time), tf.int32)
    if segment_ids is not None:
        queries = tf.cast(segment_ids, tf.int32)
    keys = queries
    if mask is not None:
        keys = tf.where(tf.cast(mask, tf.bool), keys, -1)
    paddings = ((0, 0), (0, padding))
    return [tf.pad(queries, paddings), tf.pad(keys, paddings, constant_values=-1)]


def _with_gradient(
    forward: Callable, backward: Callable, segments: list[Tensor], head_dim: int
) -> Callable:
    """Combines the kernels of the forward and the backward pass."""

    @_custom_gradient
    def attend(query, key, value):
        output, log_sum = forward(query, key, value, segments or None)

        def gradient(upstream):
            product = tf.cast(output, tf.float32) * tf.cast(upstream, tf.float32)
            batch, columns, heads, time = log_sum.shape
            shift = tf.reshape(product, (batch, time, columns, heads, head_dim))
            shift = tf.transpose(tf.reduce_sum(shift, -1), (0, 2, 3, 1))  # as log_sum
            given = (query, key, value, segments or None, log_sum, shift, upstream)
            d_query, *others = backward(*given)
            return tf.cast(d_query, query.dtype), *others

        return output, gradient

    return attend


def _in_graph(function: Callable) -> Callable:
    """Returns a JAX function as one op, compiled for TPUs only and without a gradient."""
    from jax.experimental import jax2tf

    return jax2tf.convert(
        function,
        with_gradient=False,
        native_serialization_platforms=("tpu",),
        # Preflight lowers on a machine without a TPU; callers have asked `target.platform()`.
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )


def _kernel() -> Any:
    """Returns the module `flash`, if this machine can run it."""
    # TensorFlow holds the TPU of this process, so jax may only trace.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        from tftpu.models.kernels import flash
    except ImportError as error:
        raise UserError(
            "model.attention='flash' needs jax beside TensorFlow, and it is not installed: run "
            "`pip install jax==0.6.0` on a TPU VM (the one that fits the libtpu that "
            f"tensorflow-tpu needs), `{installation.command('preflight')}` elsewhere, or use "
            "model.attention='plain'."
        ) from error
    if not internals.reads_what_jax_writes():
        raise UserError(
            f"model.attention='flash': TensorFlow {tf.__version__} cannot read what this jax "
            "writes: run `pip install jax==0.6.0 jaxlib==0.6.0`, or use model.attention='plain'."
        )
    return flash
