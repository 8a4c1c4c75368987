"""Data that Python has at hand: arrays, generators, random numbers."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import record_shards
from tftpu.input_pipelines.reading.epochs import Training
from tftpu.input_pipelines.sources import Synthetic, features_of

_log = logging.getLogger(__name__)


def from_arrays(
    features: Any, labels: Any = None, weights: Any = None, *, global_batch_size: int, seed: int = 0
) -> Training:
    """A pipeline over arrays in memory, shuffled anew each epoch.

    Args:
        features: what `numpy.asarray` takes, or a dict or tuple of such; the first dimension counts
            the examples.
        labels, weights: the same, or None.
        global_batch_size: examples a step.
        seed: of the order.

    Raises:
        UserError: arrays of different lengths, empty ones, or a dtype that no device takes.
    """
    given = [part for part in (features, labels, weights) if part is not None]
    batch = tf.nest.map_structure(device_array, tuple(given) if len(given) > 1 else given[0])
    lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(batch)}
    if len(lengths) != 1 or not lengths - {0}:
        raise UserError(
            f"The arrays hold {', '.join(map(str, sorted(lengths)))} examples: they must hold the "
            "same number, and one at least."
        )
    return Training(batch, global_batch_size, seed, prepare=lambda examples, seeds: examples)


def from_generator(
    make: Callable[[], Iterable[Any]], spec: Any, *, global_batch_size: int
) -> tf.data.Dataset:
    """Batches of what a Python generator yields, on one host.

    One Python thread makes the examples, as fast as it can: a TPU will wait for it. A run that goes
    on calls the generator again and skips what it has seen, so it must yield the same each time.
    For anything large write it once to TFRecord shards (`tfrecord.write`, `manifest.write`).

    Args:
        make: called for each epoch.
        spec: of one example, nested `tf.TensorSpec`s.
        global_batch_size: examples a step.
    """
    for part in tf.nest.flatten(spec):
        if part.dtype == tf.string or None in part.shape:
            raise UserError(f"{part} is no static shape and dtype of a device.")
    _log.warning(
        "Data from a Python generator come from one thread, and a TPU waits for it: for a long run "
        "write them to TFRecord shards."
    )
    dataset = tf.data.Dataset.from_generator(make, output_signature=spec)
    return dataset.repeat().batch(global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def training(data: Synthetic, seed: int) -> Training:
    """Random examples, shuffled."""
    return Training(_random(data), data.global_batch_size, seed, lambda examples, seeds: examples)


def evaluation(data: Synthetic) -> tf.data.Dataset:
    """The same random examples, in order."""
    return tf.data.Dataset.from_tensor_slices(_random(data)).batch(data.global_batch_size)


def batch_spec(data: Synthetic, examples: int) -> Any:
    """(features, labels) of a batch."""
    return record_shards.spec(features_of(data.spec), (data.features, data.label), examples)


def _random(data: Synthetic) -> tuple:
    rng = np.random.default_rng(0)
    values = {}
    for name, feature in features_of(data.spec).items():
        shape = (data.examples, *feature.shape)
        if feature.dtype == "float32":
            values[name] = rng.standard_normal(shape, np.float32)
        else:
            dtype = np.int32 if feature.dtype in ("int64", "uint16") else feature.dtype
            values[name] = rng.integers(0, feature.num_classes, shape).astype(dtype)
    return record_shards.arranged(values, data.features, data.label)


def device_array(value: Any) -> np.ndarray:
    """As a device takes it: float64 as float32, int64 as int32.

    Raises:
        UserError: neither numbers nor booleans, or an integer that int32 cannot hold.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"An array of {array.dtype} cannot go to a device: make it numbers.")
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.name in ("int64", "uint64", "uint32", "uint16"):
        narrow = array.astype(np.int32)
        if not np.array_equal(narrow, array):
            raise UserError(f"An array of {array.dtype} holds numbers that int32 does not.")
        return narrow
    return array
