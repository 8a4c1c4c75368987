"""Batches of named features in dtypes that devices support."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.tensors import Spec, Tensor

# A TPU does not support these dtypes, or they are needlessly wide.
_NARROW: dict[str, Any] = {"int64": tf.int32, "uint16": tf.int32}


def build_spec(
    found: Mapping[str, Feature],
    features: tuple[str, ...],
    label: str,
    weight: str = "",
    *,
    examples: int,
) -> Spec:
    """Returns the spec of the batch that `arrange_batch` makes.

    Raises:
        UserError: a feature is missing, or is a string.
    """
    values = {}
    for name in filter(None, (*features, label, weight)):
        if name not in found:
            raise UserError(f"The data has no feature {name!r}; it has {sorted(found)}.")
        if found[name].dtype == "string":
            raise UserError(
                f"The feature {name!r} is a string, which no device supports. For images and "
                "their labels, use StreamedImages with format=tfrecord; convert text to tokens."
            )
        dtype = _NARROW.get(found[name].dtype, tf.as_dtype(found[name].dtype))
        values[name] = tf.TensorSpec((examples, *found[name].shape), dtype)
    return arrange_batch(values, features, label, weight)


def arrange_batch(
    values: Mapping[str, Any], features: tuple[str, ...], label: str, weight: str = ""
) -> Any:
    """Returns features[, labels][, weights], a tuple if several; a single feature is not a dict."""
    chosen = {name: values[name] for name in features}
    batch = [chosen if len(chosen) > 1 else next(iter(chosen.values()))]
    batch += [values[name] for name in (label, weight) if name]
    return tuple(batch) if len(batch) > 1 else batch[0]


def narrow_dtypes(values: Mapping[str, Tensor], found: Mapping[str, Feature]) -> dict[str, Tensor]:
    """Converts values to dtypes that devices support.

    Raises:
        tf.errors.InvalidArgumentError: a number does not fit int32.
    """
    for name, value in values.items():
        if value.dtype == tf.int64:
            tf.debugging.assert_equal(
                tf.cast(tf.cast(value, tf.int32), tf.int64), value, f"{name!r} does not fit int32"
            )
    return {
        name: tf.cast(value, _NARROW.get(found[name].dtype, value.dtype))
        for name, value in values.items()
    }
