"""From a user's dataset to what a device loop takes: static global batches, shared out."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config import Share
from tftpu.engines.tensorflow.hosts import input_hosts
from tftpu.errors import UserError


def for_training(
    dataset: Any,
    start: int,
    class_weight: dict[int, float] | None = None,
    host: int = 0,
    hosts: int = 1,
) -> tf.data.Dataset:
    """An endless dataset of whole global batches, from step `start` on.

    Args:
        dataset: batched by the global batch. A `tf.data.Dataset` is repeated if it is finite; its
            position at `start` is reached by skipping, so its order has to be deterministic for a
            resumed run to see the same. A pipeline of `tftpu.input_pipelines` has
            `starting_at(step)`, which decodes nothing that lies before.
        class_weight: weight of each label; becomes the sample weight.
        host, hosts: of a pipeline, the part of each batch that one of several hosts reads.

    Raises:
        UserError: not a dataset, or one that is empty or not batched.
    """
    if is_pipeline(dataset):
        dataset = dataset.starting_at(start, host, hosts)
    else:
        dataset = _checked(dataset)
        if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            dataset = dataset.repeat()
        dataset = _static_batches(dataset).skip(start)
    if class_weight:
        dataset = dataset.map(lambda *batch: _weigh(batch, class_weight))
    return _narrow(dataset)


def training_iterator(
    dataset: Any,
    start: int,
    strategy: tf.distribute.Strategy,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """An iterator over the shares of the global batches from step `start` on.

    Of a pipeline each host reads its own part of a batch; a `tf.data.Dataset` is read whole.
    """
    if not is_pipeline(dataset):
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


def is_pipeline(dataset: Any) -> bool:
    """Whether it can start at any step by itself, as those of `tftpu.input_pipelines` do."""
    return hasattr(dataset, "starting_at")


def for_evaluation(dataset: Any, replicas: int):
    """A dataset of `(batch, valid)`: every example once, the last batch padded.

    Args:
        dataset: finite. The batch is rounded up to a multiple of `replicas`.

    Raises:
        UserError: not a dataset, or one that never ends.
    """
    dataset = finite(dataset)
    size = -(-batch_size(dataset) // replicas) * replicas
    return _narrow(dataset).map(lambda *batch: _pad(batch, size))


def finite(dataset: Any) -> tf.data.Dataset:
    """What can be evaluated on.

    Raises:
        UserError: not a dataset, or one that never ends.
    """
    dataset = _checked(dataset)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "The evaluation data never end: take out .repeat(), or cut them with .take(batches)."
        )
    return dataset


def share_spec(dataset: tf.data.Dataset, replicas: int, gradient_accumulation_steps: int) -> Any:
    """One replica's share of a batch of the dataset, as `tf.TensorSpec`s.

    Raises:
        UserError: the replicas and microbatches do not divide the global batch.
    """
    spec = dataset.element_spec
    size = keras.tree.flatten(spec)[0].shape[0]
    share = (
        Share(size, replicas, gradient_accumulation_steps).examples * gradient_accumulation_steps
    )
    return keras.tree.map_structure(
        lambda s: (
            tf.TensorSpec((share, *s.shape[1:]), s.dtype) if isinstance(s, tf.TensorSpec) else s
        ),
        spec,
    )


def features_spec(batches: tf.data.Dataset) -> Any:
    """The spec of one batch of `for_evaluation`, without the mask of what is valid."""
    return batches.element_spec[0]


def distribute(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy):
    """The dataset with each global batch cut into consecutive shares, one a replica."""
    hosts = input_hosts(strategy)
    if hosts > 1:
        return strategy.distribute_datasets_from_function(
            lambda context: _part_of_host(dataset, context)
        )
    # tf.data's own sharding would give each pipeline a part of the files, and so another order.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
    return strategy.experimental_distribute_dataset(dataset)


def _part_of_host(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Of each global batch the consecutive shares of one host's replicas, one after the other.

    Every host reads the whole: only so is the order that of one host. The dataset is endless.
    """
    size = keras.tree.flatten(dataset.element_spec)[0].shape[0]
    share = context.get_per_replica_batch_size(size)
    held = size // context.num_input_pipelines
    first = context.input_pipeline_id * held

    def part(*batch):
        batch = keras.tree.map_structure(lambda t: t[first : first + held], batch)
        return batch if len(batch) > 1 else batch[0]

    return _endless(dataset.map(part).rebatch(share, drop_remainder=True)).prefetch(
        tf.data.AUTOTUNE
    )


def _endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """An endless dataset that says so: on several hosts, others lose their static shape."""
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def batch_size(dataset: tf.data.Dataset) -> int:
    """Examples in a batch; taken from the first one where the dataset does not say."""
    specs = keras.tree.flatten(dataset.element_spec)
    for spec in specs:
        if not isinstance(spec, tf.TensorSpec):
            raise UserError(
                f"The data has a {type(spec).__name__}, which cannot go to a device: make it dense "
                "numbers in the input pipeline."
            )
        if spec.shape.rank == 0:
            raise UserError("The dataset is not batched: add .batch(global_batch_size).")
    sizes = {spec.shape[0] for spec in specs} - {None}
    if len(sizes) > 1:
        raise UserError(
            f"The parts of a batch hold {', '.join(map(str, sorted(sizes)))} examples: they must "
            "hold the same number. Is the dataset batched?"
        )
    if sizes:
        return sizes.pop()
    for batch in dataset.take(1):
        return int(tf.shape(keras.tree.flatten(batch)[0])[0])
    raise UserError("The dataset is empty.")


def _static_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """An endless dataset in batches of one static size: a ragged one would not compile.

    What a ragged last batch lacks is taken from the next epoch, so no example is left out.
    """
    size = batch_size(dataset)
    if all(spec.shape[0] == size for spec in keras.tree.flatten(dataset.element_spec)):
        return dataset
    return dataset.rebatch(size, drop_remainder=True)


def _checked(dataset: Any) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise UserError(
            f"The data is a {type(dataset).__name__}: pass a tf.data.Dataset, as "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)."
        )
    if dataset.cardinality() == 0:
        raise UserError("The dataset is empty.")
    return dataset


def _narrow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """float64 becomes Keras's float: TPUs have none, and Keras's `fit` does the same."""
    specs = keras.tree.flatten(dataset.element_spec)
    if not any(isinstance(s, tf.TensorSpec) and s.dtype == tf.float64 for s in specs):
        return dataset

    def cast(tensor):
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def narrow(*batch):
        batch = keras.tree.map_structure(cast, batch)
        return batch if len(batch) > 1 else batch[0]

    return dataset.map(narrow)


def _pad(batch: tuple, size: int) -> tuple:
    batch = batch if len(batch) > 1 else batch[0]
    count = tf.shape(keras.tree.flatten(batch)[0])[0]
    fits = tf.debugging.assert_less_equal(
        count,
        size,
        f"A batch is larger than the first one, of at most {size} examples: batch the evaluation "
        "data anew, as by .rebatch(size).",
    )
    with tf.control_dependencies([fits]):
        count = tf.identity(count)

    def pad(tensor):
        # The first example again: zeros could be a class or a token that does not exist.
        filled = tf.concat([tensor, tf.repeat(tensor[:1], size - count, axis=0)], 0)
        return tf.ensure_shape(filled, (size, *tensor.shape[1:]))

    valid = tf.cast(tf.range(size) < count, tf.float32)
    return keras.tree.map_structure(pad, batch), valid


def _weigh(batch: tuple, class_weight: dict[int, float]) -> tuple:
    if len(batch) != 2 or keras.tree.is_nested(batch[1]):
        raise UserError(
            "class_weight needs batches of (features, labels) with one array of labels: put the "
            "weights into the dataset as (features, labels, sample_weight) instead."
        )
    x, y = batch
    if y.shape.rank is not None and y.shape.rank > 2:
        raise UserError(
            f"class_weight needs one label an example, and the labels have the shape {y.shape}: "
            "put the weights into the dataset as (features, labels, sample_weight) instead."
        )
    table = np.ones(max(class_weight) + 1, np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    one_hot = y.shape.rank == 2 and y.shape[1] != 1
    labels = tf.argmax(y, 1) if one_hot else tf.cast(tf.reshape(y, (-1,)), tf.int32)
    return x, y, tf.gather(tf.constant(table), labels)
