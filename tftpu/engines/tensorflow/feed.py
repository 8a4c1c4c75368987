"""Divides batches into shards of static shape, one for each replica."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tftpu.engines.data.arrays import unwrap_features
from tftpu.engines.data.batches import build_epoch_batches, count_batches, fill_up
from tftpu.engines.data.conversion import (
    Epochs,
    Pipeline,
    build_epochs,
    build_evaluation,
    build_training,
)
from tftpu.engines.data.gate import Gate, endless
from tftpu.engines.data.tuning import limit_tuning, switch_tuning_off
from tftpu.engines.engine import Epoch
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.hosts import count_input_hosts, is_read_remotely


def iterate_training_batches(
    dataset: Any,
    start: int,
    strategy: tf.distribute.Strategy,
    class_weight: dict[int, float] | None = None,
    epoch: Epoch | None = None,
    gate: Gate | None = None,
) -> Iterator[Any]:
    """Returns an endless iterator over the shards of the global batches from step `start`.

    Each host reads a whole `tf.data.Dataset`, but only its own part of each batch of a `Pipeline`,
    if the batches can be divided equally.

    Args: as for `tftpu.engines.data.conversion.build_training` and `Engine.batches`.
    """
    gate = None if is_read_remotely(strategy) else gate
    shards = strategy.num_replicas_in_sync
    divided = isinstance(dataset, Pipeline)  # whether a host reads only its part of a batch
    if isinstance(dataset, Pipeline) and isinstance(dataset, Epochs):
        divided = epoch is None and dataset.global_batch_size % shards == 0
    if epoch is not None and not divided:
        batches = build_epochs(dataset, start, epoch, shards, class_weight, gate)
        return iterate(distribute(batches, strategy))
    if not divided:
        batches = build_training(dataset, start, class_weight, gate=gate)
        alike = Epoch(1, count_examples(batches.element_spec))
        return iterate(distribute(build_epoch_batches(batches, alike, start, shards), strategy))

    def build_host_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        host, hosts = context.input_pipeline_id, context.num_input_pipelines
        shard = context.get_per_replica_batch_size(dataset.global_batch_size)
        # Each host reads consecutive examples of a batch, because its replicas are consecutive.
        batches = build_training(dataset, start, class_weight, host, hosts)
        if shard * hosts < dataset.global_batch_size:
            batches = batches.rebatch(shard, drop_remainder=True)
        return limit_tuning(endless(batches).prefetch(tf.data.AUTOTUNE))

    options = _build_input_options(strategy)
    return iterate(strategy.distribute_datasets_from_function(build_host_dataset, options))


def build_evaluation_batches(
    dataset: Any, strategy: tf.distribute.Strategy
) -> tuple[tf.data.Dataset, int | None]:
    """Returns the padded batches of an evaluation, and their number (None if unknown)."""
    batches = build_evaluation(dataset, strategy.num_replicas_in_sync)
    count = int(batches.cardinality())
    if count_input_hosts(strategy) > 1 and not isinstance(strategy, tf.distribute.TPUStrategy):
        # Each host takes this number of batches from an endless data set: see
        # `_select_part_of_host`.
        count = count if count >= 0 else sum(1 for _ in count_batches(iter(batches), count))
        batches = batches.repeat()
    return batches, count if count >= 0 else None


def distribute(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Divides each global batch of a data set into consecutive shards, one per replica."""
    if count_input_hosts(strategy) > 1:
        return strategy.distribute_datasets_from_function(
            lambda context: _select_part_of_host(dataset, context)
        )
    # tf.data's automatic sharding would give each input pipeline some of the files, and so change
    # the order of the examples.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = limit_tuning(dataset.with_options(options).prefetch(tf.data.AUTOTUNE))
    return strategy.experimental_distribute_dataset(dataset, _build_input_options(strategy))


def iterate(distributed: Any) -> Any:
    """Returns an iterator over a distributed data set.

    Devices prefetch without autotuning, which would only delay the iterators' deletion.
    """
    return internals.create_iterator(distributed, switch_tuning_off)


def _build_input_options(strategy: tf.distribute.Strategy) -> tf.distribute.InputOptions | None:
    """Returns options with which virtual CPU devices read from host memory; None for others.

    By default, each device has an iterator that copies batches in a thread: see `limit_tuning`.
    """
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if mirrored and "CPU" in strategy.extended.worker_devices[0]:
        return tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return None


def split_shards(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """Divides a batch in host memory into consecutive shards of equal size, one per replica.

    Padding fills up the last shards if the examples cannot be divided equally.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return keras.tree.map_structure(tf.convert_to_tensor, batch)
    size = -(-count_examples(batch) // replicas)
    batch = fill_up(batch, size * replicas)

    def slice_shard(context: Any) -> Any:
        first = context.replica_id_in_sync_group * size
        return keras.tree.map_structure(
            lambda t: tf.convert_to_tensor(t[first : first + size]), batch
        )

    return strategy.experimental_distribute_values_from_function(slice_shard)


def _select_part_of_host(
    dataset: tf.data.Dataset, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Returns an endless data set of one host's shards, one per replica in turn.

    Every host reads the whole endless data set, so the order of examples is the same as on one
    host.
    """
    size = count_examples(dataset.element_spec)
    shard = context.get_per_replica_batch_size(size)
    held = size // context.num_input_pipelines
    first = context.input_pipeline_id * held

    def slice_shard(*batch):
        cut: Any = keras.tree.map_structure(
            lambda t: t[first : first + held], unwrap_features(batch)
        )
        return cut

    return endless(dataset.map(slice_shard).rebatch(shard, drop_remainder=True)).prefetch(
        tf.data.AUTOTUNE
    )
