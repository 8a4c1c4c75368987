"""Converts examples to records (`tf.train.Example`) and back, given a manifest's features."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.formats import pillow
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.tensors import Tensor

_IMAGES = (pillow.JPEG, pillow.PNG, b"GIF8", b"II*\0", b"MM\0*")  # the first bytes of image files
_DTYPES = {"bytes_list": "string", "int64_list": "int64", "float_list": "float32"}

Parser = Callable[[Tensor, Tensor], dict[str, Tensor]]


def encode(example: dict[str, Any], features: dict[str, Feature]) -> bytes:
    """Returns an example as a record. Equal values give equal bytes.

    Args:
        example: array-likes by feature name; images and strings as bytes (or str).
        features: the features of the data set; the example must have exactly these.

    Raises:
        UserError: a feature is missing or unknown, has another shape or dtype, or is a class id
            out of range.
    """
    for name in set(example) ^ set(features):
        if name in features:
            raise UserError(f"The example has no feature {name!r}; it has {sorted(example)}.")
        raise UserError(
            f"The example has a feature {name!r}, which the data set does not have."
            f"{did_you_mean(name, features)}"
        )
    encoded = {
        name: _encode_feature(name, example[name], features[name]) for name in sorted(features)
    }
    record = tf.train.Example(features=tf.train.Features(feature=encoded))
    return record.SerializeToString(deterministic=True)


def build_parser(features: dict[str, Feature]) -> Parser:
    """Returns a function that maps a vector of records to examples, for `Dataset.map`.

    The function takes records (batch,) and their names for errors (batch,), both string tensors. It
    returns tensors (batch, *shape) by feature name; images stay encoded. It raises
    `tf.errors.InvalidArgumentError`, with the name of the record, if a feature is missing, has
    another shape or dtype, holds a number that its dtype cannot, or is a class id out of range.
    """
    parsed = {
        name: tf.io.FixedLenFeature(
            () if feature.encoding == "raw" else feature.shape, _choose_stored_dtype(feature)
        )
        for name, feature in features.items()
    }

    def parse(records: Tensor, names: Tensor) -> dict[str, Tensor]:
        values: dict[str, Any] = tf.io.parse_example(records, parsed, example_names=names)
        return {
            name: _decode_feature(name, values[name], feature, names)
            for name, feature in features.items()
        }

    return parse


def find_features(record: bytes, place: str) -> dict[str, Feature]:
    """Returns the features that a record holds, except those without a value.

    Args:
        record: a record of any program.
        place: the place of the record, for errors.

    Raises:
        UserError: the record is not a `tf.train.Example`.
    """
    try:
        values = tf.train.Example.FromString(record).features.feature
    except message.DecodeError as error:
        raise UserError(f"{place} is not a tf.train.Example.") from error
    found = {}
    for name in sorted(values):
        kind = values[name].WhichOneof("kind")
        held = getattr(values[name], kind).value if kind else ()
        if not held:
            continue
        shape = () if len(held) == 1 else (len(held),)
        is_image = kind == "bytes_list" and not shape and held[0].startswith(_IMAGES)
        found[name] = Feature(_DTYPES[kind], shape, "image" if is_image else "list")
    return found


def _encode_feature(name: str, value: Any, feature: Feature) -> tf.train.Feature:
    if feature.dtype == "string":
        values = np.asarray(value, object)
        _check_shape(name, values.shape, feature)
        for held in values.reshape(-1):
            if not isinstance(held, str | bytes):  # bytes(3) would be three zero bytes
                raise UserError(
                    f"The feature {name!r} holds {held!s:.80}: it must be text or bytes."
                )
        values = [v.encode() if isinstance(v, str) else v for v in values.reshape(-1)]
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    try:
        value = np.asarray(value)
        array = value.astype(feature.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(_explain_dtype(name, value, feature)) from error
    _check_shape(name, array.shape, feature)
    if not np.array_equal(array, value) and not np.issubdtype(array.dtype, np.floating):
        raise UserError(_explain_dtype(name, value, feature))
    if feature.num_classes and not (
        0 <= array.min(initial=0) <= array.max(initial=0) < feature.num_classes
    ):
        raise UserError(
            f"The feature {name!r} holds the class {array}: it must be at least 0 and below "
            f"{feature.num_classes}."
        )
    if feature.encoding == "raw":
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw]))
    flat = array.reshape(-1)
    if np.issubdtype(array.dtype, np.floating):
        return tf.train.Feature(float_list=tf.train.FloatList(value=flat))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=flat))


def _explain_dtype(name: str, value: Any, feature: Feature) -> str:
    return f"The feature {name!r} holds {value!s:.80}, which is not {feature.dtype}."


def _check_shape(name: str, shape: tuple[int, ...], feature: Feature) -> None:
    if tuple(shape) != tuple(feature.shape):
        raise UserError(f"The feature {name!r} has the shape {shape}: it must be {feature.shape}.")


def _choose_stored_dtype(feature: Feature) -> tf.DType:
    """Returns the dtype in which a record holds a feature."""
    if feature.encoding != "list" or feature.dtype == "string":
        return tf.string
    return tf.float32 if feature.dtype == "float32" else tf.int64


def _decode_feature(name: str, value: Tensor, feature: Feature, names: Tensor) -> Tensor:
    if feature.dtype == "string":
        return value
    dtype = tf.as_dtype(feature.dtype)
    if feature.encoding == "raw":
        size = int(np.prod(feature.shape)) * dtype.size
        what = f"the feature {name!r} must have {size} bytes, for {feature.dtype} {feature.shape}"
        check(tf.strings.length(value) == size, what, names)
        value = tf.reshape(tf.io.decode_raw(value, dtype), (-1, *feature.shape))
    of_record = range(1, 1 + len(feature.shape))  # all axes but that of the batch
    if feature.num_classes:
        # In float64, because num_classes may be above what the dtype holds: 256 for uint8.
        wide: Tensor = tf.cast(value, tf.float64)
        inside = (wide >= 0) & (wide < feature.num_classes)
        inside = tf.reduce_all(inside, axis=of_record)
        check(inside, f"the class id {name!r} is not in [0, {feature.num_classes})", names)
    narrow = tf.cast(value, dtype)
    if value.dtype == tf.int64 and dtype != tf.int64:  # a record holds all integers as int64
        fits = tf.reduce_all(tf.cast(narrow, tf.int64) == value, axis=of_record)
        check(fits, f"the feature {name!r} holds a number that is not {feature.dtype}", names)
    return narrow


def check(fine: Tensor, what: str, names: Tensor) -> None:
    """Raises an error with the name of the first record that is not `fine`, (batch,), bool."""
    bad = tf.boolean_mask(names, ~fine)[:1]
    tf.debugging.Assert(tf.reduce_all(fine), [bad, what])
