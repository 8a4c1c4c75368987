"""Exchange between replicas inside a loss function: `tftpu.all_gather` and `tftpu.positions`."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tftpu.engines.data import division
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops

_GATHERED: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("gathered")


@contextlib.contextmanager
def gathering() -> Iterator[list[Tensor]]:
    """Yields a list of the tensors that are given to `all_gather` in the block, in this thread."""
    seen: list[Tensor] = []
    token = _GATHERED.set(seen)
    try:
        yield seen
    finally:
        _GATHERED.reset(token)


def all_gather(x: Tensor) -> Tensor:
    """Gathers a tensor of each example over all replicas, in the order of the global batch.

    For losses over pairs of examples, which are then the same on any number of devices. Gradients
    flow back to the replica that each example came from. On one device, and outside of training
    and evaluation, it returns its argument.

    Args:
        x: (examples, ...), computed from this replica's share of the batch.

    Returns:
        (examples of the global batch, ...), of the same dtype.

    Raises:
        UserError: with microbatches, which are computed one after the other.

    Example:

    ```python
    def contrastive(model, batch, training):
        z = keras.ops.normalize(model(batch, training=training))
        others = tftpu.all_gather(z)
        return loss_of_each(z @ keras.ops.transpose(others), tftpu.positions(z))
    ```
    """
    x = ops.convert_to_tensor(x)
    _GATHERED.get([]).append(x)
    announced = division.announced()
    if announced.microbatches > 1:
        raise UserError(
            f"tftpu.all_gather() needs the whole batch at once, and it is computed in "
            f"{announced.microbatches} microbatches: set gradient_accumulation_steps=1."
        )
    if announced.shares == 1:
        return x
    context: Any = tf.distribute.get_replica_context()
    if context is None:  # traced for its shapes only
        return ops.concatenate([x] * announced.shares)
    return _gather(x, context, announced.shares)


def positions(x: Tensor) -> Tensor:
    """Returns the positions of this replica's examples in what `all_gather` returns.

    Args:
        x: (examples, ...), computed from this replica's share of the batch.

    Returns:
        (examples,), int32.
    """
    examples = ops.convert_to_tensor(x).shape[0]
    own = ops.arange(examples, dtype="int32")
    context = tf.distribute.get_replica_context()
    if context is None or division.announced().shares == 1:
        return own
    return own + tf.cast(context.replica_id_in_sync_group, tf.int32) * examples


def _gather(x: Tensor, context: Any, shares: int) -> Tensor:
    replica = tf.cast(context.replica_id_in_sync_group, tf.int32)

    # A sum over replicas of which each fills its own rows: every strategy has this collective.
    @tf.custom_gradient
    def gather(value: Any) -> Any:
        own = tf.one_hot(replica, shares, dtype=value.dtype)
        placed = tf.reshape(own, (shares, *[1] * value.shape.rank)) * value[None]
        summed: Any = context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

        def backward(d_gathered):
            total: Any = context.all_reduce(tf.distribute.ReduceOp.SUM, d_gathered)
            return tf.reshape(total, (shares, *value.shape))[replica]

        return tf.reshape(summed, (shares * value.shape[0], *value.shape[1:])), backward

    return gather(x)
