"""Gathers examples over the replicas of `tf.distribute`, for `tftpu.engines.collectives`."""

from typing import Any

import tensorflow as tf

from tftpu.engines.data.division import Exchange
from tftpu.tensors import Tensor


def find_index() -> Tensor:
    """Returns the index of this replica, () int32; 0 if a step is traced only for its shapes."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else tf.cast(context.replica_id_in_sync_group, tf.int32)


def gather(x: Tensor, shards: int) -> Tensor:
    """Gathers the examples of all replicas.

    Args:
        x: the examples of this replica, (examples, ...).
        shards: the number of replicas.

    Returns:
        (shards * examples, ...); its gradient flows back to the replica of each example.
    """
    if x.dtype.size < 4 and not x.dtype.is_floating:  # some strategies cannot sum small integers
        return tf.cast(_gather_wide(tf.cast(x, tf.int32), shards), x.dtype)
    return _gather_wide(x, shards)


def _gather_wide(x: Tensor, shards: int) -> Tensor:
    context: Any = tf.distribute.get_replica_context()
    if context is None:  # outside of replicas, only the shapes matter
        return tf.concat([x] * shards, 0)
    replica = find_index()

    # Each replica fills its own rows, and a sum over replicas joins them: every strategy has this
    # collective.
    @tf.custom_gradient
    def gather_rows(value: Any) -> Any:
        own = tf.reshape(tf.range(shards) == replica, (shards, *[1] * value.shape.rank))
        # Not a product: 0 times NaN or infinity is NaN, which would reach the other replicas' rows.
        placed = tf.where(own, value[None], tf.zeros((), value.dtype))
        summed: Any = context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

        def backward(d_gathered):
            total: Any = context.all_reduce(tf.distribute.ReduceOp.SUM, d_gathered)
            return tf.reshape(total, (shards, *value.shape))[replica]

        return tf.reshape(summed, (shards * value.shape[0], *value.shape[1:])), backward

    return gather_rows(x)


EXCHANGE = Exchange(gather, find_index)
