"""Data from Python: arrays and generators."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.tensors import Spec

_log = logging.getLogger(__name__)


def from_arrays(
    features: Any, labels: Any = None, weights: Any = None, *, global_batch_size: int, seed: int = 0
) -> ArrayPipeline:
    """Returns a pipeline over arrays in memory, reshuffled each epoch.

    Args:
        features: an array-like, or a dict or tuple of them; the first dimension counts the
            examples.
        labels, weights: of the same form, or None.
        global_batch_size: examples per step.
        seed: the seed of the order.

    Raises:
        UserError: the arrays have different lengths or are empty, or no device supports a dtype.
    """
    given = [part for part in (features, labels, weights) if part is not None]
    batch = tf.nest.map_structure(to_device_array, tuple(given) if len(given) > 1 else given[0])
    lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(batch)}
    if len(lengths) != 1 or not lengths - {0}:
        raise UserError(
            f"The arrays hold {', '.join(map(str, sorted(lengths)))} examples: all must hold the "
            "same number of examples, at least one."
        )
    return ArrayPipeline(batch, global_batch_size, seed, prepare=lambda examples, seeds: examples)


def from_generator(
    make: Callable[[], Iterable[Any]], spec: Spec, *, global_batch_size: int
) -> tf.data.Dataset:
    """Returns batches of the examples of a Python generator, on one host.

    One Python thread makes the examples, so a TPU will usually wait for it. A resumed run calls
    `make` again and skips the examples that it has seen, so the generator must yield the same
    examples each time. Write anything large to TFRecord shards once (`tfrecord.write`,
    `manifest.write`).

    Args:
        make: a function that is called for each epoch and returns the examples.
        spec: the spec of one example, nested `tf.TensorSpec`s.
        global_batch_size: examples per step.

    Raises:
        UserError: a shape is not static, or no device supports a dtype.
    """
    for part in tf.nest.flatten(spec):
        if part.dtype == tf.string or None in part.shape:
            raise UserError(f"{part} must have a static shape, and a dtype that devices support.")
    _log.warning(
        "A Python generator runs in a single thread, so the TPU waits for its data. For a long "
        "run, write the data to TFRecord shards."
    )
    dataset = tf.data.Dataset.from_generator(make, output_signature=spec)
    return dataset.repeat().batch(global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def to_device_array(value: Any) -> np.ndarray:
    """Returns an array in a dtype that devices support, such as float32 for float64.

    Raises:
        UserError: it holds neither numbers nor Booleans, or integers that do not fit int32.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"No device supports an array of {array.dtype}: convert it to numbers.")
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.name in ("int64", "uint64", "uint32", "uint16"):
        narrow = array.astype(np.int32)
        if not np.array_equal(narrow, array):
            raise UserError(f"An array of {array.dtype} holds numbers that do not fit int32.")
        return narrow
    return array
