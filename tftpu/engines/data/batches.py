"""Checks the batches of a user's `tf.data.Dataset`, fixes their shapes, pads and weights them."""

import contextlib
import logging
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.data.arrays import Arrays, unwrap_features
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.engines.engine import Epoch, explain_size
from tftpu.engines.objectives.losses import count_examples
from tftpu.errors import UserError
from tftpu.tensors import Nest

logger = logging.getLogger(__name__)

_LONG = 10.0  # seconds of reading after which a message explains the wait
_LONGEST = 3600.0  # maximum seconds of counting the batches of a data set that may be endless

_CUT = "pass steps= (validation_steps= to fit), or limit it with .take(batches)"
_UNEQUAL = (
    "A batch holds arrays of {} examples, but all must hold the same number. Is the dataset "
    "batched? If an array holds several items for each example, give it one more axis, such as "
    "(64, 3, …) for 3 items of each of 64 examples."
)

# Errors of tf.data and of CPU operations about shapes and numbers, and their explanations.
_EXPLAINED = {
    r"`generator` yielded an element of shape \((\d+).*?\) where an element of shape \((\d+)": (
        "A batch has another shape than the first one, with {0} examples instead of {1}. A "
        "generator may yield batches of any size."
    ),
    r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)": (
        "A label is {0}, and the model's output has {1} classes, which are numbered from 0 (NaN "
        "is converted to the smallest integer)."
    ),
    r"indices\S* = (-?\d+) is not in \[0, (\d+)\)": (
        "The data have the id {0}, and an embedding of the model has {1}, which are numbered from "
        "0: is the tokenizer's vocabulary larger than the model's?"
    ),
}

_T = TypeVar("_T")

# The `id` of each data set of unknown length that has ended once. It may be read again without a
# warning, as validation data are in every epoch.
_ended: set[int] = set()


def build_complete_batches(dataset: Any) -> tf.data.Dataset:
    """Returns an endless data set in batches of one static size, so the step compiles once.

    A smaller last batch is filled up from the next epoch, so no example is left out.

    Raises:
        UserError: the argument is not a data set, is empty, or is not batched.
    """
    dataset = check_dataset(dataset)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.repeat()
    size = infer_batch_size(dataset)
    if all(spec.shape[0] == size for spec in keras.tree.flatten(dataset.element_spec)):
        return dataset
    return dataset.rebatch(size, drop_remainder=True)


def build_finite_dataset(dataset: Any) -> tf.data.Dataset:
    """Returns the data of an evaluation, a data set or arrays, as a finite data set.

    Raises:
        UserError: the argument is not a data set, or never ends.
    """
    dataset = check_dataset(
        dataset.iterate_once() if isinstance(dataset, Arrays | PyBatches) else dataset
    )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "The evaluation data never end: pass the number of batches (steps=, or "
            "validation_steps= to fit), or limit the data with .take(batches)."
        )
    return dataset


def measure_epoch(dataset: Any) -> Epoch:
    """Returns the number and sizes of a data set's batches; reads all of it if they are unknown.

    Raises:
        UserError: the argument is not a data set, never ends, or does not end within an hour.
    """
    dataset = check_dataset(dataset)
    known = int(dataset.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "The dataset never ends, so it has no epochs: pass steps_per_epoch= with epochs=, or "
            "steps=, or remove .repeat()."
        )
    specs = keras.tree.flatten(dataset.element_spec)
    if known > 0 and specs[0].shape[0] is not None:
        return Epoch(known, specs[0].shape[0])
    started = time.monotonic()
    sizes = dataset.map(lambda *batch: tf.shape(keras.tree.flatten(batch)[0])[0])
    steps = first = last = 0
    instead = "pass steps_per_epoch= with epochs=, or steps="
    with data_errors():
        for last in map(int, count_batches(sizes.as_numpy_iterator(), known, instead)):
            steps, first = steps + 1, first or last
    if steps == 0:
        raise UserError("The dataset is empty.")
    if time.monotonic() - started > _LONG:
        logger.warning(
            "The dataset was read once, in %.0f s, to find where its epochs end. This is "
            "unnecessary with steps=, or with .batch(size, drop_remainder=True) and a "
            "known cardinality.",
            time.monotonic() - started,
        )
    return Epoch(steps, first, last if last != first else None)


def count_batches(items: Iterable[_T], batches: int, instead: str = _CUT) -> Iterator[_T]:
    """Yields items, one for each batch of a data set that is read to count its batches.

    Args:
        items, batches, instead: as for `warn_if_endless`.

    Raises:
        UserError: the data set does not end within an hour.
    """
    started, limit = time.monotonic(), f"{_LONGEST / 60:.0f} minutes"
    say = f"Counting its batches is given up after {limit}"
    for number, item in enumerate(warn_if_endless(items, batches, f"{instead}. {say}"), 1):
        yield item
        if batches < 0 and time.monotonic() - started > _LONGEST:
            raise UserError(
                f"The dataset did not end after {number:,} batches and {limit}, so its number of "
                f"batches is unknown: {instead}."
            )


def warn_if_endless(
    items: Iterable[_T], batches: int | None, instead: str = _CUT, dataset: Any = None
) -> Iterator[_T]:
    """Yields items, one for each batch of a data set, and warns if it may never end.

    The warning appears while the data are read, if their number of batches is unknown.

    Args:
        items: the items to yield.
        batches: the number of batches; None or tf.data's constant if it is unknown.
        instead: the advice in the warning.
        dataset: the data set that is read; after it has ended once, it gives no more warnings.
            None if it is read only once.
    """
    unknown = (batches is None or batches < 0) and id(dataset) not in _ended
    unknown = unknown and not isinstance(dataset, PyBatches)  # their length is known
    started, due = time.monotonic(), _LONG
    for number, item in enumerate(items, 1):
        yield item
        seconds = time.monotonic() - started
        if unknown and seconds >= due:
            logger.warning(
                "The dataset does not say how many batches it has. After %s batches and %.0f s "
                "it has not ended yet. If it never ends, %s.",
                f"{number:,}",
                seconds,
                instead,
            )
            due *= 2
    if unknown and dataset is not None:
        _ended.add(id(dataset))
        weakref.finalize(dataset, _ended.discard, id(dataset))


def infer_static_shapes(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set with static sizes of all axes but the first, from its first batch.

    Raises:
        UserError: the data set is empty.
    """
    specs = [spec.shape for spec in keras.tree.flatten(dataset.element_spec)]
    if all(shape.rank is not None and shape[1:].is_fully_defined() for shape in specs):
        return dataset
    shapes = [t.shape for batch in dataset.take(1) for t in keras.tree.flatten(batch)]
    if not shapes:
        raise UserError("The dataset is empty.")

    def ensure(tensor, given, shape):
        if shape.rank == 0:
            return tf.ensure_shape(tensor, shape)
        same = tf.debugging.assert_equal(
            tf.shape(tensor)[1:],
            tf.constant(list(shape[1:]), tf.int32, (shape.rank - 1,)),
            f"A batch has another shape than the first one, {tuple(shape)}: XLA compiles static "
            "shapes only. Pad or crop to one size in the input pipeline.",
        )
        with tf.control_dependencies([same]):
            tensor = tf.identity(tensor)
        return tf.ensure_shape(tensor, (given[0] if given.rank else None, *shape[1:]))

    def ensure_all(*batch):
        flat = keras.tree.flatten(batch)
        parts: Any = keras.tree.pack_sequence_as(batch, list(map(ensure, flat, specs, shapes)))
        return unwrap_features(parts)

    return dataset.map(ensure_all)


def build_epoch_batches(
    dataset: tf.data.Dataset, epoch: Epoch, start: int, shards: int
) -> tf.data.Dataset:
    """Pads batches to one static size that can be divided into equal shards.

    Each batch, also the smaller last one of an epoch, is divided into the same number of shards,
    the last of which may lack examples. Each shard begins with its examples and ends with padding,
    which the train step ignores.

    Args:
        dataset: an endless data set from batch `start` on; only an epoch's last batch may be
            smaller.
        epoch: the length of an epoch.
        start: the number of batches before the first.
        shards: number of shards that a batch is divided into.
    """
    specs = keras.tree.flatten(dataset.element_spec)
    equal = epoch.examples % shards == 0 and epoch.last is None
    if equal and all(spec.shape[0] == epoch.examples for spec in specs):
        return dataset
    padded_shard = -(-epoch.examples // shards)

    def pad_shards(index, batch):
        last = epoch.last if epoch.last is not None else epoch.examples
        expected = tf.where(index % epoch.steps == epoch.steps - 1, last, epoch.examples)
        found = tf.shape(keras.tree.flatten(batch)[0])[0]
        same = tf.debugging.assert_equal(
            found,
            expected,
            explain_size(epoch.examples, last=last),
        )
        with tf.control_dependencies([same]):
            shard = -(-tf.identity(found) // shards)

        def pad_one(tensor):
            rest = [[0, shard * shards - found], *[[0, 0]] * len(tensor.shape[1:])]
            cut = tf.reshape(tf.pad(tensor, rest), (shards, shard, *tensor.shape[1:]))
            fill = [[0, 0], [0, padded_shard - shard], *[[0, 0]] * len(tensor.shape[1:])]
            return tf.reshape(tf.pad(cut, fill), (padded_shard * shards, *tensor.shape[1:]))

        return keras.tree.map_structure(pad_one, batch)

    return dataset.enumerate(start).map(pad_shards)


def fill_up(batch: Nest, size: int) -> Nest:
    """Fills up a batch of NumPy arrays to `size` examples by repeating its first example."""
    missing = size - count_examples(batch)
    if not missing:
        return batch
    return keras.tree.map_structure(
        lambda array: np.concatenate([array, np.repeat(array[:1], missing, axis=0)]), batch
    )


def infer_batch_size(dataset: tf.data.Dataset) -> int:
    """Returns the number of examples in a batch; reads the first batch if the spec lacks it.

    Raises:
        UserError: the data set is empty, or its parts hold different numbers of examples.
    """
    sizes = {spec.shape[0] for spec in keras.tree.flatten(dataset.element_spec)}
    if None not in sizes:
        return sizes.pop()
    if dataset not in _SIZES:
        _SIZES[dataset] = _read_batch_size(dataset)
    return _SIZES[dataset]


# Batch sizes that were read from the data: every evaluation of a run needs the size of the same
# data set, and reading a single batch makes a pipeline prepare many.
_SIZES: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()


def _read_batch_size(dataset: tf.data.Dataset) -> int:
    for batch in dataset.take(1):
        found = {int(tf.shape(part)[0]) for part in keras.tree.flatten(batch)}
        _refuse_unequal(found)
        return found.pop()
    raise UserError("The dataset is empty.")


def narrow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Casts float64, which TPUs do not have, to Keras's float dtype, as Keras's `fit` does."""
    specs = keras.tree.flatten(dataset.element_spec)
    if not any(isinstance(s, tf.TensorSpec) and s.dtype == tf.float64 for s in specs):
        return dataset

    def cast(tensor):
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor

    def cast_all(*batch):
        parts: Any = keras.tree.map_structure(cast, unwrap_features(batch))
        return parts

    return dataset.map(cast_all)


def pad(batch: Any, size: int) -> tuple[Any, tf.Tensor]:
    """Pads a batch; returns it with a mask, (size,) float32: 1.0 for examples, 0.0 for padding.

    Args:
        batch: an element of a data set, as a tuple.
        size: number of examples after padding.
    """
    given: Any = unwrap_features(batch)
    count = tf.shape(keras.tree.flatten(given)[0])[0]
    fits = tf.debugging.assert_less_equal(
        count,
        size,
        f"A batch is larger than the first one, which allows at most {size} examples: rebatch the "
        "evaluation data, for example with .rebatch(size).",
    )
    with tf.control_dependencies([fits]):
        count = tf.identity(count)

    def fill(tensor):
        # Repeats the first example, because zeros could be a class or a token that does not exist.
        filled = tf.concat([tensor, tf.repeat(tensor[:1], size - count, axis=0)], 0)
        return tf.ensure_shape(filled, (size, *tensor.shape[1:]))

    valid = tf.cast(tf.range(size) < count, tf.float32)
    return keras.tree.map_structure(fill, given), valid


def weigh(batch: tuple[Any, ...], class_weight: dict[int, float]) -> tuple[Any, Any, tf.Tensor]:
    """Returns a batch of features and labels with sample weights from `class_weight`.

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
            f"class_weight needs one label per example, but the labels have the shape {y.shape}: "
            "put the weights into the dataset as (features, labels, sample_weight) instead."
        )
    table = np.ones(int(max(class_weight)) + 1, np.float32)
    for label, weight in class_weight.items():
        table[int(label)] = weight  # labels that come from a CSV file are often floats
    one_hot = y.shape.rank == 2 and y.shape[1] != 1
    # Keras rounds labels as well, such as smoothed ones of 0.05 and 0.95.
    rounded = tf.round(tf.cast(tf.reshape(y, (-1,)), tf.float64))
    labels = tf.argmax(y, 1) if one_hot else tf.cast(rounded, tf.int64)
    # Labels without a class weight weigh 1, as in Keras.
    known = (labels >= 0) & (labels < len(table))
    found = tf.gather(tf.constant(table), tf.where(known, labels, tf.zeros_like(labels)))
    return x, y, tf.where(known, found, tf.ones_like(found))


@contextlib.contextmanager
def data_errors() -> Iterator[None]:
    """Turns errors of tf.data and of CPU operations that the data cause into a `UserError`.

    Raises:
        UserError: a batch, a label or an id does not have the expected shape or range.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(r"assertion failed: \[(An? (?:batch|epoch) .*?)\]", str(error), re.DOTALL)
        if found is not None:
            raise UserError(found[1]) from error
        for pattern, sentence in _EXPLAINED.items():
            if found := re.search(pattern, str(error)):
                raise UserError(sentence.format(*found.groups())) from error
        raise
    except tf.errors.UnknownError as error:
        # tf.data reports an error of a Python generator, such as one of `PyBatches`, as text.
        found = re.search(
            r"\b(?:User|Bucket|Missing)Error: (.*?)\nTraceback", str(error), re.DOTALL
        )
        if found is None:
            raise
        raise UserError(found[1]) from error


def check_dataset(dataset: Any) -> tf.data.Dataset:
    """Returns a checked data set of batches, with static sizes of all axes but the first.

    Raises:
        UserError: the argument is not a data set, is empty, or is not batched.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise UserError(
            f"The data is a {type(dataset).__name__}: pass a tf.data.Dataset, such as "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)."
        )
    if dataset.cardinality() == 0:
        raise UserError("The dataset is empty.")
    for spec in keras.tree.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise UserError(
                f"The data contains a {type(spec).__name__}, which cannot be sent to a device: "
                "convert it to dense numbers in the input pipeline."
            )
    dataset = infer_static_shapes(dataset)
    specs = keras.tree.flatten(dataset.element_spec)
    if any(spec.shape.rank == 0 for spec in specs):
        raise UserError("The dataset is not batched: add .batch(global_batch_size).")
    sizes = {spec.shape[0] for spec in specs}
    _refuse_unequal(sizes - {None})
    return dataset


def _refuse_unequal(sizes: set[int]) -> None:
    """Raises `UserError` if the parts of a batch hold different numbers of examples."""
    if len(sizes) > 1:
        raise UserError(_UNEQUAL.format(", ".join(map(str, sorted(sizes)))))
