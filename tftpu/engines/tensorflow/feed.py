"""Converts a user's data set to the input of a device loop: shares of static batches."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from tftpu.config import Share
from tftpu.engines.arrays import alone
from tftpu.engines.engine import Epoch
from tftpu.engines.losses import examples_of
from tftpu.engines.tensorflow import checks
from tftpu.engines.tensorflow.batches import (
    checked,
    complete_batches,
    epoch_batches,
    epoch_of,
    finite_dataset,
    narrow,
    pad,
    static_batch_size,
    weigh,
)
from tftpu.engines.tensorflow.hosts import input_hosts
from tftpu.errors import UserError
from tftpu.tensors import Nest


@runtime_checkable
class Pipeline(Protocol):
    """A data set that can start at any step, such as a pipeline of `tftpu.input_pipelines`."""

    global_batch_size: int

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """Returns an endless data set of global batches, or of one host's part of each."""
        ...


@runtime_checkable
class Epochs(Protocol):
    """Data that pass by in epochs and can start at any step, such as arrays in memory."""

    def epoch(self) -> Epoch:
        """Returns the length of an epoch."""
        ...

    def from_step(self, step: int) -> tf.data.Dataset:
        """Returns an endless data set, in which the last batch of an epoch may be smaller."""
        ...


def length_of(dataset: Any) -> Epoch:
    """Returns the length of one pass over a data set.

    Raises:
        UserError: not a data set, or one whose length nothing tells.
    """
    if isinstance(dataset, Epochs):
        return dataset.epoch()
    if isinstance(dataset, Pipeline):
        count, size = getattr(dataset, "count", None), dataset.global_batch_size
        if count is None:
            raise UserError(
                f"{type(dataset).__name__} does not say how many examples an epoch has: pass "
                "steps_per_epoch= with epochs=, or steps=."
            )
        return Epoch(-(-count // size), size)  # the last batch is filled up from the next epoch
    return epoch_of(dataset)


def for_training(
    dataset: Any,
    start: int,
    class_weight: dict[int, float] | None = None,
    host: int = 0,
    hosts: int = 1,
) -> tf.data.Dataset:
    """Returns an endless data set of complete global batches, from step `start`.

    Args:
        dataset: batched by the global batch. A `tf.data.Dataset` is repeated if it is finite; its
            position at `start` is reached by skipping, so its order has to be deterministic for a
            resumed run to see the same batches. A `Pipeline` starts there without decoding what
            comes before.
        start: number of batches to skip.
        class_weight: weight of each label, which becomes the sample weight.
        host, hosts: for a pipeline, the part of each batch that one of several hosts reads.

    Raises:
        UserError: not a data set, or one that is empty or not batched.
    """
    if isinstance(dataset, Pipeline):
        batches = dataset.starting_at(start, host, hosts)
    elif isinstance(dataset, Epochs):
        batches = complete_batches(dataset.from_step(0)).skip(start)
    else:
        batches = complete_batches(dataset).skip(start)
    return narrow(_weighed(batches, class_weight))


def for_epochs(
    dataset: Any,
    start: int,
    epoch: Epoch,
    shares: int,
    class_weight: dict[int, float] | None = None,
) -> tf.data.Dataset:
    """Returns an endless data set from step `start`, in which each epoch has its own last batch.

    Args:
        dataset, start, class_weight: as for `for_training`.
        epoch: of the data set; its smaller last batch is padded as `epoch_batches` does.
        shares: number of shares that a batch is cut into.
    """
    if isinstance(dataset, Epochs):
        batches = dataset.from_step(start)
    else:
        batches = checked(dataset).repeat().skip(start)
    batches = _weighed(batches, class_weight)
    return narrow(epoch_batches(batches, epoch, start, shares))


def training_iterator(
    dataset: Any,
    start: int,
    strategy: tf.distribute.Strategy,
    class_weight: dict[int, float] | None = None,
    epoch: Epoch | None = None,
) -> Iterator[Any]:
    """Returns an iterator over the shares of the global batches from step `start`.

    Each host reads its own part of the batches of a pipeline; a `tf.data.Dataset` is read in full.
    With an epoch, its batches are those of `for_epochs`.
    """
    if epoch is not None and (isinstance(dataset, Epochs) or not isinstance(dataset, Pipeline)):
        shares = strategy.num_replicas_in_sync
        batches = for_epochs(dataset, start, epoch, shares, class_weight)
        return iter(distribute(batches, strategy))
    if not isinstance(dataset, Pipeline):
        return iter(distribute(for_training(dataset, start, class_weight), strategy))

    def of_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
        host, hosts = context.input_pipeline_id, context.num_input_pipelines
        share = context.get_per_replica_batch_size(dataset.global_batch_size)
        # Consecutive shares go to consecutive replicas.
        batches = for_training(dataset, start, class_weight, host, hosts)
        if share * hosts < dataset.global_batch_size:
            batches = batches.rebatch(share, drop_remainder=True)
        return _endless(batches).prefetch(tf.data.AUTOTUNE)

    return iter(strategy.distribute_datasets_from_function(of_host))


def for_evaluation(dataset: Any, replicas: int) -> tf.data.Dataset:
    """Returns a data set of `(batch, valid)`: every example once, the last batch padded.

    Args:
        dataset: finite. The batch is rounded up to a multiple of `replicas`.
        replicas: number of shares that a batch is cut into.

    Raises:
        UserError: not a data set, or one that never ends.
    """
    dataset = finite_dataset(dataset)
    size = -(-static_batch_size(dataset) // replicas) * replicas

    @tf.autograph.experimental.do_not_convert  # there is nothing to translate: starts sooner
    def padded(*batch):
        return pad(batch, size)

    return narrow(dataset).map(padded)


def evaluation_batches(
    dataset: Any, strategy: tf.distribute.Strategy
) -> tuple[tf.data.Dataset, int | None]:
    """Returns the batches of an evaluation and their number, None if it is not known."""
    batches = for_evaluation(dataset, strategy.num_replicas_in_sync)
    count = int(batches.cardinality())
    if input_hosts(strategy) > 1 and not isinstance(strategy, tf.distribute.TPUStrategy):
        # Endless, and all hosts take the same number of batches: see `_part_of_host`.
        count = count if count >= 0 else int(batches.reduce(0, lambda n, _: n + 1))
        batches = batches.repeat()
    return batches, count if count >= 0 else None


def share_spec(batches: tf.data.Dataset, replicas: int, microbatches: int = 1) -> Nest:
    """Returns the spec of one replica's share of a batch, as `tf.TensorSpec`s.

    Args:
        batches: global batches of static shape.
        replicas: number of replicas that share a batch.
        microbatches: number of microbatches that each share is cut into.

    Raises:
        UserError: the replicas and microbatches do not divide the global batch.
    """
    spec = batches.element_spec
    size = examples_of(spec)
    share = Share(size, replicas, microbatches).examples * microbatches
    keras.tree.map_structure(checks.refuse_spec, spec)
    return with_examples(spec, share)


def cut_spec(spec: Nest, replicas: int) -> Nest:
    """Returns the spec of one replica's share of a padded batch.

    Args:
        spec: of a batch whose size `replicas` divides.
        replicas: number of shares.
    """
    return with_examples(spec, examples_of(spec) // replicas)


def with_examples(spec: Nest, examples: int) -> Nest:
    """Returns a batch spec with another number of examples, the first dimension of each tensor."""
    return keras.tree.map_structure(
        lambda s: tf.TensorSpec((examples, *s.shape[1:]), s.dtype), spec
    )


def last_share_spec(spec: Nest, examples: int, replicas: int, microbatches: int = 1) -> Nest:
    """Returns the spec of one replica's share of the smaller batch that an epoch ends with.

    Args:
        spec: of one share of a complete batch.
        examples: number of examples of the smaller batch.
        replicas: number of replicas that share a batch.
        microbatches: number of microbatches that each share is cut into.

    Raises:
        UserError: the replicas and microbatches do not divide it.
    """
    parts = replicas * microbatches
    if examples % parts:
        size = examples_of(spec) * replicas
        raise UserError(
            f"Each epoch ends with a batch of {examples} examples, which {parts} equal parts "
            f"({replicas} replicas x {microbatches} microbatches) cannot share. Pass "
            "steps_per_epoch=, which fills every batch up from the next epoch; or another batch "
            f"size than {size}; or leave {examples % parts} examples out."
        )
    share = examples // replicas
    return keras.tree.map_structure(lambda s: tf.TensorSpec((share, *s.shape[1:]), s.dtype), spec)


def distribute(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Returns the data set with each global batch cut into consecutive shares, one per replica."""
    if input_hosts(strategy) > 1:
        return strategy.distribute_datasets_from_function(
            lambda context: _part_of_host(dataset, context)
        )
    # tf.data's own sharding would give each pipeline a part of the files, and so another order.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
    return strategy.experimental_distribute_dataset(dataset)


def _part_of_host(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns the consecutive shares of one host's replicas, one after the other.

    Every host reads the full data set, which is endless: otherwise the order would not be that of
    one host.
    """
    size = examples_of(dataset.element_spec)
    share = context.get_per_replica_batch_size(size)
    held = size // context.num_input_pipelines
    first = context.input_pipeline_id * held

    def part(*batch):
        cut: Any = keras.tree.map_structure(lambda t: t[first : first + held], alone(batch))
        return cut

    return _endless(dataset.map(part).rebatch(share, drop_remainder=True)).prefetch(
        tf.data.AUTOTUNE
    )


def _weighed(batches: tf.data.Dataset, class_weight: dict[int, float] | None) -> tf.data.Dataset:
    if not class_weight:
        return batches
    return batches.map(lambda *batch: weigh(batch, class_weight))


def _endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a data set as endless: on several hosts, others lose their static shape."""
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
