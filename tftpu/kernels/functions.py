"""The kernels as functions of Keras's backend: ops of a TensorFlow graph, or part of a JAX program.

In a JAX program for several devices, each device runs a kernel on its shard of examples and heads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tftpu import installation, sharding
from tftpu.errors import UserError
from tftpu.sharding import EXAMPLES, HEADS, TIME
from tftpu.tensors import Tensor, ops

# The shapes for which `attention="auto"` uses the kernel: they fit into the memory of every TPU,
# and on v4 and later a step costs less than with plain attention, according to
# `tests.benchmarks.compiled.attention`; docs/speed.md has the figures, also for v2 and v3.
SHORTEST, LONGEST = 1024, 4096  # tokens
HEAD_DIMS = (64, 128)
_WHOLE = (EXAMPLES, None, None)  # how an array of queries, keys and values side by side is sharded


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    segment_ids: Tensor | None,
    mask: Tensor | None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `tftpu.kernels.attention.attention` with the kernel `flash`.

    Args: as for `attention`, with static shapes.

    Raises:
        UserError: jax is missing, or the kernel does not support these shapes.
    """
    flash = _import_kernel()
    batch, time, heads, head_dim = query.shape
    refusal = find_refusal(query, key, causal, mask, soft_cap)
    if refusal is not None:
        raise UserError(refusal)
    ring = sharding.get_ring() if causal else None
    pairwise = mask is not None and len(mask.shape) == 3
    times = _count_repeats(query, key.shape[2], flash)
    if times > 1:  # the gradient of `ops.repeat` sums over the queries that share a key
        key, value = (ops.repeat(x, times, axis=2) for x in (key, value))
    padding = -time % flash.BLOCK
    segments = _build_segments(batch, time, segment_ids, None if pairwise else mask, padding)
    limits = [segments or None]
    if ring is None:
        limits.append(_build_mask(mask, padding, flash.BLOCK) if pairwise else None)
    column = max(flash.LANES // head_dim, 1)  # heads per column

    def to_columns(x):  # (batch, time, heads, head_dim) -> (batch, padded time, columns x 128)
        x = ops.pad(x, ((0, 0), (0, padding), (0, -heads % column), (0, 0)))
        return ops.reshape(x, (*x.shape[:2], -1))

    if ring is None:
        run = {"head_dim": head_dim, "causal": causal, "soft_cap": soft_cap}
        module, shared = flash, None
    else:
        from tftpu.kernels import ring as rings

        run, module, shared = {"head_dim": head_dim, "ring": ring}, rings, TIME
    tokens = (EXAMPLES, shared, (HEADS, column * head_dim))
    sums = (EXAMPLES, HEADS, None, shared)  # (batch, columns, heads per column, time)
    of_limits = ((EXAMPLES, shared), (EXAMPLES, None, None))[: len(limits)]
    given = (tokens, tokens, tokens, *of_limits)
    forward = _call(functools.partial(module.forward, **run), given, (tokens, sums))
    backward = _call(
        functools.partial(module.backward, **run),
        (*given, sums, tokens, tokens),
        (tokens, tokens, tokens),
    )
    given = [to_columns(query), to_columns(key), to_columns(value)]
    if sinks is not None:
        forward, backward = _add_sinks(forward, backward)
        padded = ops.pad(ops.cast(sinks, "float32"), (0, -heads % column))
        given.append(ops.reshape(padded, (-1, column)))  # (columns, heads per column)
    found = _attach_gradient(forward, backward, limits)(*given)
    return ops.reshape(found, (*found.shape[:2], -1, head_dim))[:, :time, :heads]


def find_refusal(
    query: Any, key: Any, causal: bool, mask: Any = None, soft_cap: float = 0.0
) -> str | None:
    """Returns why `flash_attention` cannot take these shapes, and what to do; None if it can.

    Args: as for `attention`, with static shapes.
    """
    flash = _import_kernel()
    _, time, _, head_dim = query.shape
    if key.shape[1] != time:
        return (
            f"model.attention='flash' needs as many keys as queries, not {key.shape[1]} and "
            f"{time}: use model.attention='plain'."
        )
    ring = sharding.get_ring() if causal else None
    chunks = _count_chunks(causal)
    if flash.LANES % head_dim and head_dim % flash.LANES:
        return (
            "model.attention='flash' needs heads whose number of channels divides 128 or is a "
            f"multiple of 128, not {head_dim}: use model.attention='plain'."
        )
    if time > chunks * flash.LONGEST:
        longer = causal and keras.config.backend() == "jax"
        return (
            f"model.attention='flash' supports at most {chunks * flash.LONGEST} tokens here, not "
            f"{time}: "
            + ("shard them along a longer 'sequence' axis of the mesh, or " if longer else "")
            + "use model.attention='plain'."
        )
    if ring is not None and time % (chunks * flash.BLOCK):
        return (
            f"On a mesh with {ring.axis}:{ring.size}, model.attention='flash' needs a multiple of "
            f"{chunks * flash.BLOCK} tokens, not {time}: pad the sequences, or use "
            "model.attention='plain'."
        )
    pairwise = mask is not None and len(mask.shape) == 3
    if ring is not None and (pairwise or soft_cap):
        return (
            f"On a mesh with {ring.axis}:{ring.size}, model.attention='flash' supports neither "
            "masks of queries and keys nor soft caps: use another axis of the mesh, or "
            "model.attention='plain'."
        )
    return None


def _count_chunks(causal: bool) -> int:
    """Returns how many chunks the time axis has: two per device that shares it, otherwise one."""
    ring = sharding.get_ring() if causal else None
    return 1 if ring is None else 2 * ring.size


def takes_attention(query: Any, key: Any) -> bool:
    """Returns whether `flash_attention` can be used: only on TPUs, and only if time is not sharded.

    Args:
        query: (batch, time, heads, head_dim).
        key: (batch, key time, key heads, head_dim).
    """
    shapes = [*query.shape, *key.shape]
    if sharding.get_platform() != "tpu" or not all(isinstance(size, int) for size in shapes):
        return False
    fits = query.shape[2] % key.shape[2] == 0 and sharding.get_ring() is None
    return fits and find_refusal(query, key, causal=False) is None


def is_cheaper(time: int | None, head_dim: int, causal: bool) -> bool:
    """Returns whether the kernel fits every TPU and costs less there than plain attention.

    Args:
        time: tokens of an example; None if they are not known.
        head_dim: channels of a head.
        causal: whether attention is causal; only then may the time axis be sharded.
    """
    longest = LONGEST * _count_chunks(causal)
    return isinstance(time, int) and SHORTEST <= time <= longest and head_dim in HEAD_DIMS


def _count_repeats(query: Tensor, key_heads: int, flash: Any) -> int:
    """Returns how often each key head must be repeated for the query heads that share it.

    The kernel supports shared key heads only if a head fills a column of lanes. With long
    float32 sequences, they need more memory than a core of older TPUs has. If heads are sharded,
    each device needs at least one key head.

    Args:
        query: (batch, time, heads, head_dim).
        key_heads: a divisor of the heads.
        flash: the module `tftpu.kernels.flash`.
    """
    _, time, heads, head_dim = query.shape
    shared = heads // key_heads
    is_float32 = keras.backend.standardize_dtype(query.dtype) == "float32"
    if head_dim % flash.LANES or (is_float32 and time * head_dim > flash.SHARED_FLOAT32):
        return shared
    parts = sharding.count_shards(HEADS)
    fitting = [n for n in range(1, shared + 1) if shared % n == 0 and key_heads * n % parts == 0]
    return fitting[0] if fitting else shared


def takes_rotation(x: Any, heads: int) -> bool:
    """Returns whether `rotate_pairs` can be used for heads side by side, (batch, time, width).

    Raises:
        UserError: on a TPU, jax is missing.
    """
    if sharding.get_platform() != "tpu" or not all(isinstance(size, int) for size in x.shape):
        return False
    lanes, head_dim = _import_kernel().LANES, x.shape[2] // heads
    return x.shape[2] % lanes == 0 and not (lanes % head_dim and head_dim % lanes)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) of a head by its angle.

    Args:
        x: heads side by side, (batch, time, width).
        cosine: the cosines of the angles, (batch or 1, time, head_dim / 2), float32.
        sine: the sines of the angles, with the shape and dtype of cosine.
        heads: number of heads in the width.

    Returns:
        (batch, time, width), of x's dtype.
    """
    from tftpu.kernels import rotary

    head_dim = x.shape[2] // heads
    lanes = max(_import_kernel().LANES, head_dim)
    cosine, sine = (
        ops.tile(ops.concatenate([first, second], -1), (1, 1, lanes // head_dim))
        for first, second in ((cosine, cosine), (-sine, sine))
    )
    tokens = (EXAMPLES, TIME, (HEADS, lanes))
    waves = (EXAMPLES if cosine.shape[0] == x.shape[0] else None, TIME, None)
    run = functools.partial(rotary.rotate, head_dim=head_dim)
    rotate = _call(run, (tokens, waves, waves), tokens)

    @ops.custom_gradient
    def turn(x):
        def gradient(*upstream):  # rotates by the negative angle
            (upstream,) = upstream
            return rotate(upstream, cosine, -sine)

        return rotate(x, cosine, sine), gradient

    return turn(x)


def takes_whole(x: Any, heads: int) -> bool:
    """Returns whether `whole_attention` can be used for tokens, (batch, time, width).

    Raises:
        UserError: on a TPU, jax is missing.
    """
    if sharding.get_platform() != "tpu" or not all(isinstance(size, int) for size in x.shape):
        return False
    _import_kernel()
    from tftpu.kernels import whole

    _, time, width = x.shape
    dtype = keras.backend.standardize_dtype(x.dtype)
    return whole.takes(time, width, heads, 4 if dtype == "float32" else 2)


def whole_attention(
    product: Tensor, bias: Any, heads: int, segment_ids: Tensor | None = None
) -> Tensor:
    """Computes self-attention over short sequences, given the projected queries, keys, values.

    Args:
        product: (batch, time, 3 x width): the projection without its bias.
        bias: (3 x width,), a tensor or variable. The kernel sums its gradient along with that of
            `product`.
        heads: number of heads in the width.
        segment_ids: see `tftpu.kernels.attention.attention`.

    Returns:
        (batch, time, width), of `product`'s dtype.
    """
    from tftpu.kernels import whole

    batch, time, width = product.shape
    segments = _build_segments(batch, time, segment_ids, None, 0) or None
    head_dim = width // 3 // heads
    of_segments = (EXAMPLES, None)
    forward = _call(
        functools.partial(whole.forward, head_dim=head_dim), (_WHOLE, of_segments), _WHOLE
    )
    backward = _call(
        functools.partial(whole.backward, head_dim=head_dim),
        (_WHOLE, of_segments, _WHOLE),
        (_WHOLE, _WHOLE),
    )

    @ops.custom_gradient
    def attend(product, bias):
        qkv = product + bias

        def gradient(*upstream):
            (upstream,) = upstream
            d_qkv, sums = backward(qkv, segments, upstream)
            return d_qkv, ops.cast(ops.sum(sums, (0, 1)), bias.dtype)

        return forward(qkv, segments), gradient

    # A copy, because custom gradients do not accept the variable itself.
    return attend(product, ops.copy(bias))


def _build_segments(
    batch: int, time: int, segment_ids: Tensor | None, mask: Tensor | None, padding: int
) -> list[Tensor]:
    """Returns segment ids of queries and keys, (batch, time) int32; [] if all keys are seen."""
    if segment_ids is None and mask is None and not padding:
        return []
    queries = ops.zeros((batch, time), "int32")
    if segment_ids is not None:
        queries = ops.cast(segment_ids, "int32")
    keys = queries
    if mask is not None:
        keys = ops.where(ops.cast(mask, "bool"), keys, -1)
    paddings = ((0, 0), (0, padding))
    return [ops.pad(queries, paddings), ops.pad(keys, paddings, constant_values=-1)]


def _build_mask(mask: Tensor, padding: int, block: int) -> list[Tensor]:
    """Returns a mask of queries and keys in the form of the kernel, `flash.Mask`.

    Args:
        mask: (batch, time, key time), bool.
        padding: number of positions to append to both time axes.
        block: number of positions in a block of the kernel.
    """
    mask = ops.pad(ops.cast(mask, "int8"), ((0, 0), (0, padding), (0, padding)))
    mask = ops.transpose(mask, (0, 2, 1))
    batch, time, _ = mask.shape
    blocks = ops.reshape(mask, (batch, time // block, block, time // block, block))
    return [mask, ops.cast(ops.max(blocks, (2, 4)), "int32")]


def _attach_gradient(forward: Callable, backward: Callable, limits: list[Any]) -> Callable:
    """Combines the kernels of the forward and the backward pass into a differentiable function.

    Args:
        forward: a function of query, key, value, limits and, if there are any, sinks.
        backward: a function of the same arguments, then log_sum, output and upstream.
        limits: arguments without a gradient, each a list of tensors or None.
    """
    # Passed as arguments: in a loop, JAX cannot differentiate a closure over tensors of the loop.
    flat = [tensor for limit in limits for tensor in limit or ()]

    @ops.custom_gradient
    def attend(*given):
        kept, sinks = iter(given[3:][: len(flat)]), given[3 + len(flat) :]
        seen = [limit and [next(kept) for _ in limit] for limit in limits]
        output, log_sum = _mark_keepable(forward(*given[:3], *seen, *sinks))

        def gradient(*upstream):
            (upstream,) = upstream
            found = backward(*given[:3], *seen, *sinks, log_sum, output, upstream)
            return *found[:3], *([None] * len(flat)), *found[3:]

        return output, gradient

    return lambda query, key, value, *sinks: attend(query, key, value, *flat, *sinks)


def _add_sinks(forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """Adds attention sinks to kernels: one more key for each head, whose value is zero.

    The softmax's denominators grow, and the output shrinks by the same factor. The backward kernel
    computes weights from the denominators alone, so it needs no change.

    Args:
        forward: a function of query, key, value and limits.
        backward: a function of the same arguments, then log_sum, output and upstream.

    Returns:
        The same functions with the sinks, (columns, heads per column) float32, after the limits;
        the second has one more result, the gradient with respect to them.
    """

    def split_heads(x, sums):  # (batch, time, columns x lanes) -> (batch, time, columns, heads, -1)
        return ops.reshape(ops.cast(x, "float32"), (*x.shape[:2], *sums.shape[1:3], -1))

    def extended_forward(*given):
        *given, sinks = given
        output, log_sum = forward(*given)
        total = ops.logaddexp(log_sum, sinks[None, :, :, None])
        kept = ops.transpose(ops.exp(log_sum - total), (0, 3, 1, 2))[..., None]
        shrunk = ops.reshape(split_heads(output, log_sum) * kept, output.shape)
        return ops.cast(shrunk, output.dtype), total

    def extended_backward(*given):
        *given, sinks, total, output, upstream = given
        gradients = backward(*given, total, output, upstream)
        shift = ops.sum(split_heads(output, total) * split_heads(upstream, total), -1)
        weight = ops.exp(sinks[None, :, :, None] - total)  # (batch, columns, heads, time)
        d_sinks = -ops.sum(weight * ops.transpose(shift, (0, 2, 3, 1)), (0, 3))
        return *gradients, d_sinks

    return extended_forward, extended_backward


def _mark_keepable(results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Marks results that a recomputing backward pass may keep; does nothing on TensorFlow."""
    if keras.config.backend() != "jax":
        return results
    from tftpu.kernels import jax_checkpoint

    return jax_checkpoint.mark_attention(results)


def _call(function: Callable, inputs: Sequence[Any], outputs: Any) -> Callable:
    """Returns a function of the backend's tensors that calls a JAX function.

    Args:
        function: a JAX function of arrays.
        inputs: the kinds of each argument's dimensions, as for `tftpu.sharding.shard_function`.
        outputs: the same for each result.
    """
    if keras.config.backend() == "jax":
        return sharding.shard_function(function, inputs, outputs)
    from tftpu.kernels import tensorflow_call

    return tensorflow_call.call(function)


def has_kernels() -> bool:
    """Returns whether the kernels can be traced here; under TensorFlow, this needs jax."""
    try:
        _import_kernel()
    except UserError:
        return False
    return True


def _import_kernel() -> Any:
    """Returns the module `flash`; raises `UserError` if jax is missing or does not fit."""
    try:
        if keras.config.backend() == "tensorflow":
            from tftpu.kernels import tensorflow_call

            tensorflow_call.prepare()
        from tftpu.kernels import flash
    except ImportError as error:
        raise UserError(
            "model.attention='flash' needs jax beside TensorFlow, but jax is not installed. Run "
            "`pip install jax==0.6.0` on a TPU VM (this version fits the libtpu of "
            f"tensorflow-tpu), `{installation.command('preflight')}` elsewhere, or use "
            "model.attention='plain'."
        ) from error
    return flash
