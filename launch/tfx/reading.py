"""Reads the examples of a pipeline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from google.protobuf.message import DecodeError

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.tensors import Spec, skip_autograph
from tftpu.launch.tfx.features import Features

if TYPE_CHECKING:
    from tftpu.launch.tfx.examples import Examples

# Files read at a time; fixed, so that the order of examples is the same on every machine.
_FILES_AT_ONCE = 16


def build_training(data: "Examples", context: DataContext) -> tf.data.Dataset:
    """Returns the batches of the training split; for given files, the seed decides their order."""
    features = Features(data)
    records = _read_records(data.train_files, "train_files", features)
    records = records.shuffle(data.shuffle, seed=context.seed)
    return _batch_records(records, context, features)


def build_evaluation(data: "Examples", context: DataContext) -> tf.data.Dataset:
    """Returns the batches of the evaluation split, or only the first `eval_steps` of them."""
    features = Features(data)
    batches = _batch_records(
        _read_records(data.eval_files, "eval_files", features), context, features
    )
    return batches if data.eval_steps is None else batches.take(data.eval_steps)


def batch_spec(data: "Examples", examples: int) -> Spec:
    """Returns the shapes and dtypes of a batch of `examples`, without reading any."""
    features: Any = Features(data)
    spec = tf.data.Dataset.from_tensors(tf.zeros((0,), tf.string)).map(features.batch).element_spec
    return tf.nest.map_structure(
        lambda part: tf.TensorSpec((examples, *part.shape[1:]), part.dtype), spec
    )


def _batch_records(
    records: tf.data.Dataset, context: DataContext, features: Any
) -> tf.data.Dataset:
    batches = records.batch(context.global_batch_size)
    return batches.map(skip_autograph(features.batch), num_parallel_calls=tf.data.AUTOTUNE)


def _read_records(patterns: Sequence[str], field: str, features: Features) -> tf.data.Dataset:
    """Returns the serialized examples of files, in a fixed order.

    Raises:
        UserError: there are no such files, or they contain something else.
    """
    found = sorted({path for pattern in patterns for path in tf.io.gfile.glob(pattern)})
    if not found:
        given = ", ".join(patterns) or "empty: run_fn sets it from the pipeline"
        raise UserError(f"data.{field} is {given}, but no file has such a name.")
    records = tf.data.Dataset.from_tensor_slices(found).interleave(
        skip_autograph(_open_file),
        cycle_length=_FILES_AT_ONCE,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    _check_first(records, f"{', '.join(patterns)} (data.{field})", features)
    return records


def _open_file(path: Any) -> tf.data.Dataset:
    compression: Any = tf.where(tf.strings.regex_full_match(path, r".*\.gz"), "GZIP", "")
    return tf.data.TFRecordDataset(path, compression_type=compression)


def _check_first(records: tf.data.Dataset, source: str, features: Features) -> None:
    """Raises `UserError` unless there are examples, and the first one has the features to read.

    Args:
        records: serialized examples.
        source: the name of their files, for errors.
        features: the features that are read from the records.
    """
    try:
        first: Any = [*records.take(1).as_numpy_iterator()]
        held = {name for record in first for name in _list_names(record)}
    except (tf.errors.OpError, DecodeError) as error:
        raise UserError(
            f"The files {source} are not TFRecords of tf.Example ({type(error).__name__}: "
            f"{error}). run_fn reads only those, which ExampleGen writes by default."
        ) from error
    if not first:
        raise UserError(f"The files {source} hold no examples.")
    missing = [
        name
        for name, feature in features.stored.items()
        if isinstance(feature, tf.io.FixedLenFeature)
        and feature.default_value is None
        and name not in held
    ]
    if missing:
        raise UserError(
            f"The first example of {source} has no {', '.join(missing)}; it has "
            f"{', '.join(sorted(held))}. Use Examples(transformed=True) for the output of "
            "Transform, and transformed=False for the output of ExampleGen, which is then "
            "transformed while it is read."
        )
    try:
        tf.io.parse_example(tf.constant(first), features.stored)
    except tf.errors.InvalidArgumentError as error:
        raise UserError(
            f"The first example of {source} does not match {features.source}: {error.message}."
        ) from error


def _list_names(record: bytes) -> list[str]:
    """Returns the names of the features of a serialized example."""
    return [*tf.train.Example.FromString(record).features.feature]
