"""Batches of a user's `tf.data.Dataset`: checked, of static shape, padded and weighted."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.errors import UserError


def training_dataset(dataset: Any) -> tf.data.Dataset:
    """Returns an endless data set in batches of one static size: a ragged one would not compile.

    A ragged last batch is filled up from the next epoch, so no example is left out.

    Raises:
        UserError: not a data set, or one that is empty or not batched.
    """
    dataset = _checked(dataset)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.repeat()
    size = static_batch_size(dataset)
    if all(spec.shape[0] == size for spec in keras.tree.flatten(dataset.element_spec)):
        return dataset
    return dataset.rebatch(size, drop_remainder=True)


def finite_dataset(dataset: Any) -> tf.data.Dataset:
    """Returns the data set if evaluation can run over it.

    Raises:
        UserError: not a data set, or one that never ends.
    """
    dataset = _checked(dataset)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "The evaluation data never end: remove .repeat(), or cut them with .take(batches)."
        )
    return dataset


def static_batch_size(dataset: tf.data.Dataset) -> int:
    """Returns the number of examples in a batch; reads the first batch if the spec lacks it.

    Raises:
        UserError: the data are not batched tensors, or empty.
    """
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


def narrow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Casts float64 to Keras's float: TPUs have none, and Keras's `fit` does the same."""
    specs = keras.tree.flatten(dataset.element_spec)
    if not any(isinstance(s, tf.TensorSpec) and s.dtype == tf.float64 for s in specs):
        return dataset

    def cast(tensor):
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def cast_all(*batch):
        parts: Any = keras.tree.map_structure(cast, batch)
        return parts if len(parts) > 1 else parts[0]

    return dataset.map(cast_all)


def pad(batch: Any, size: int) -> tuple[Any, tf.Tensor]:
    """Pads a batch; returns it with a mask of its examples, (size,) float32.

    Args:
        batch: a tuple, the parts of an element of a data set.
        size: number of examples after padding.
    """
    given: Any = batch if len(batch) > 1 else batch[0]
    count = tf.shape(keras.tree.flatten(given)[0])[0]
    fits = tf.debugging.assert_less_equal(
        count,
        size,
        f"A batch is larger than the first one, of at most {size} examples: batch the evaluation "
        "data again, for example by .rebatch(size).",
    )
    with tf.control_dependencies([fits]):
        count = tf.identity(count)

    def fill(tensor):
        # The first example again: zeros could be a class or a token that does not exist.
        filled = tf.concat([tensor, tf.repeat(tensor[:1], size - count, axis=0)], 0)
        return tf.ensure_shape(filled, (size, *tensor.shape[1:]))

    valid = tf.cast(tf.range(size) < count, tf.float32)
    return keras.tree.map_structure(fill, given), valid


def weigh(batch: tuple[Any, ...], class_weight: dict[int, float]) -> tuple[Any, Any, tf.Tensor]:
    """Returns a batch of features and labels with the sample weights that `class_weight` implies.

    Raises:
        UserError: the batch does not hold one label per example.
    """
    if len(batch) != 2 or keras.tree.is_nested(batch[1]):
        raise UserError(
            "class_weight needs batches of (features, labels) with one array of labels: put the "
            "weights into the dataset as (features, labels, sample_weight) instead."
        )
    x, y, *_ = batch
    if y.shape.rank is not None and y.shape.rank > 2:
        raise UserError(
            f"class_weight needs one label per example, and the labels have the shape {y.shape}: "
            "put the weights into the dataset as (features, labels, sample_weight) instead."
        )
    table = np.ones(max(class_weight) + 1, np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    one_hot = y.shape.rank == 2 and y.shape[1] != 1
    labels = tf.argmax(y, 1) if one_hot else tf.cast(tf.reshape(y, (-1,)), tf.int32)
    return x, y, tf.gather(tf.constant(table), labels)


def _checked(dataset: Any) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise UserError(
            f"The data is a {type(dataset).__name__}: pass a tf.data.Dataset, such as "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)."
        )
    if dataset.cardinality() == 0:
        raise UserError("The dataset is empty.")
    return dataset
