"""Examples to records and back: `tf.train.Example`, by the features of a manifest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.formats.manifest import Feature


def encode(example: dict[str, Any], features: dict[str, Feature]) -> bytes:
    """An example as a record; the same bytes for the same values.

    Args:
        example: by name, what `numpy.asarray` takes; an image or a string as bytes (or str).
        features: what it is made of; every one has to be there, and no other.

    Raises:
        UserError: a feature is missing or unknown, of another shape or dtype, or a class id out
            of range.
    """
    for name in set(example) ^ set(features):
        if name in features:
            raise UserError(f"The example has no feature {name!r}; it has {sorted(example)}.")
        raise UserError(
            f"The example has a feature {name!r}, which the data set has not."
            f"{did_you_mean(name, features)}"
        )
    encoded = {name: _encoded(name, example[name], features[name]) for name in sorted(features)}
    record = tf.train.Example(features=tf.train.Features(feature=encoded))
    return record.SerializeToString(deterministic=True)


def parser(features: dict[str, Feature]) -> Callable[..., dict[str, tf.Tensor]]:
    """A function from a vector of records to examples, to be used in `Dataset.map`.

    Its arguments are records (batch,) and, for its errors, their names (batch,), both strings; it
    returns tensors (batch, *shape) by name, an image still encoded. It raises
    `tf.errors.InvalidArgumentError`, with the name of the record, where a feature is missing or of
    another shape or dtype, and for a class id out of range.
    """
    parsed = {
        name: tf.io.FixedLenFeature(
            () if feature.encoding == "raw" else feature.shape, _stored(feature)
        )
        for name, feature in features.items()
    }

    def parse(records: tf.Tensor, names: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.io.parse_example(records, parsed, example_names=names)
        return {
            name: _decoded(name, values[name], feature, names) for name, feature in features.items()
        }

    return parse


def _encoded(name: str, value: Any, feature: Feature) -> tf.train.Feature:
    if feature.dtype == "string":
        values = np.asarray(value, object)
        _check_shape(name, values.shape, feature)
        values = [v.encode() if isinstance(v, str) else bytes(v) for v in values.reshape(-1)]
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    value = np.asarray(value)
    _check_shape(name, value.shape, feature)
    array = value.astype(feature.dtype)
    if not np.array_equal(array, value) and not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"The feature {name!r} holds {value}, which is no {feature.dtype}.")
    if feature.num_classes and not (
        0 <= array.min(initial=0) <= array.max(initial=0) < feature.num_classes
    ):
        raise UserError(
            f"The feature {name!r} holds the class {array}: there are {feature.num_classes}, from 0."
        )
    if feature.encoding == "raw":
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw]))
    flat = array.reshape(-1)
    if np.issubdtype(array.dtype, np.floating):
        return tf.train.Feature(float_list=tf.train.FloatList(value=flat))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=flat))


def _check_shape(name: str, shape: tuple, feature: Feature) -> None:
    if tuple(shape) != tuple(feature.shape):
        raise UserError(f"The feature {name!r} has the shape {shape}: it must be {feature.shape}.")


def _stored(feature: Feature) -> tf.DType:
    """The dtype that a record holds a feature in."""
    if feature.encoding != "list" or feature.dtype == "string":
        return tf.string
    return tf.float32 if feature.dtype == "float32" else tf.int64


def _decoded(name: str, value: tf.Tensor, feature: Feature, names: tf.Tensor) -> tf.Tensor:
    if feature.dtype == "string":
        return value
    dtype = tf.as_dtype(feature.dtype)
    if feature.encoding == "raw":
        size = int(np.prod(feature.shape)) * dtype.size
        what = f"the feature {name!r} has not {size} bytes, as {feature.dtype} {feature.shape} has"
        _check(tf.strings.length(value) == size, what, names)
        value = tf.reshape(tf.io.decode_raw(value, dtype), (-1, *feature.shape))
    if feature.num_classes:
        inside = (value >= 0) & (value < tf.cast(feature.num_classes, value.dtype))
        inside = tf.reduce_all(tf.reshape(inside, (tf.shape(value)[0], -1)), axis=1)
        _check(inside, f"the class id {name!r} is not in [0, {feature.num_classes})", names)
    return tf.cast(value, dtype)


def _check(fine: tf.Tensor, what: str, names: tf.Tensor) -> None:
    """Raises with the name of the first record that is not fine, (batch,)."""
    bad = tf.boolean_mask(names, ~fine)[:1]
    tf.debugging.Assert(tf.reduce_all(fine), [bad, what])
