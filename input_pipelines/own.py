"""Checks and reads users' own data sets, which may be a `tf.data.Dataset` without a pipeline."""

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.config import DataConfig, DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.addresses import EVALUATION
from tftpu.input_pipelines.tensors import Spec
from tftpu.input_pipelines.unlabelled import UnlabelledRecords, from_arrays

_log = logging.getLogger(__name__)

_LONG = 10.0  # seconds of reading after which a message is logged


def describe_state(pipeline: Any) -> dict[str, Any]:
    """Returns a training split's size and a hash; see `input_pipelines.describe_state`."""
    if not hasattr(pipeline, "count"):
        batches = int(pipeline.cardinality()) if isinstance(pipeline, tf.data.Dataset) else -1
        return {"batches": batches} if batches >= 0 else {}  # negative: unknown or endless
    found = pipeline.describe_files() if hasattr(pipeline, "describe_files") else {}
    return {"examples": pipeline.count, **found}


def check_training(data: DataConfig, found: Any) -> Any:
    """Checks and returns the training split of a user's data set.

    Raises:
        UserError: `found` is not a data set, is empty or not batched, or its batches do not have
            `data.global_batch_size` examples.
    """
    where = f"{type(data).__name__}.training()"
    if hasattr(found, "starting_at"):
        size = found.global_batch_size
    elif isinstance(found, tf.data.Dataset):
        size = _inspect_first(found, where)[0].shape[0]
        if size < data.global_batch_size and _has_end_within(found, 1):
            raise UserError(
                f"{where} returns only {size:,} examples, fewer than "
                f"data.global_batch_size={data.global_batch_size}: lower data.global_batch_size, "
                "or add .repeat() before .batch(…)."
            )
    else:
        raise UserError(
            f"{where} returns {_describe_value(found)}: return a tf.data.Dataset, such as "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(context.global_batch_size)."
        )
    if size != data.global_batch_size:
        raise UserError(
            f"{where} returns batches of {size} examples, but data.global_batch_size is "
            f"{data.global_batch_size}: end the data set with .batch(context.global_batch_size)."
        )
    return found


def check_evaluation(data: DataConfig, found: Any) -> tf.data.Dataset | None:
    """Checks and returns the evaluation split of a user's data set, which may be None.

    Raises:
        UserError: `found` is neither None nor a `tf.data.Dataset`.
    """
    if found is None or isinstance(found, tf.data.Dataset):
        return found
    raise UserError(
        f"{type(data).__name__}.evaluation() returns {_describe_value(found)}: return a finite, "
        "batched tf.data.Dataset, or None."
    )


def open_records(data: DataConfig, address: str, context: DataContext) -> UnlabelledRecords:
    """Returns the records to predict at an address; see `tftpu.input_pipelines.prediction`.

    Raises:
        UserError: the class has no `prediction`, and the address is not its evaluation split; or
            there is no such split, or it is empty or never ends.
    """
    name = type(data).__name__
    own = not type(data).prediction.__module__.startswith("tftpu.")
    found = None if own and address == EVALUATION else data.prediction(address, context)
    if isinstance(found, UnlabelledRecords):
        return found
    if found is None:
        split = check_evaluation(data, data.evaluation(context)) if address == EVALUATION else None
        if split is None:
            if type(data).__module__.startswith("tftpu."):
                raise UserError(
                    f"The input {address!r} cannot be read: for {name}, the only possible input is "
                    f"{EVALUATION!r}, if there is such a split. To write text with a language "
                    "model, run `tftpu generate RUN --prompt=TEXT`."
                )
            raise UserError(
                f"The input {address!r} cannot be read, because {name} has no method "
                f"prediction(self, address, context). Without it, only the input {EVALUATION!r} "
                "can be read, if there is such a split."
            )
        if split.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise UserError(f"{name}.evaluation() never ends: leave out .repeat().")
        parts = list(_iterate_features(split, name))
        if not parts:
            raise UserError(f"{name}.evaluation() returns an empty data set.")
        found = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)
    return from_arrays(found, context, address)


def _iterate_features(split: tf.data.Dataset, name: str) -> Iterator[Any]:
    """Yields the features of each batch; warns if a split of unknown length takes long to read."""
    started, due = time.monotonic(), _LONG
    for number, batch in enumerate(split.as_numpy_iterator(), 1):
        yield batch[0] if isinstance(batch, tuple) else batch
        seconds = time.monotonic() - started
        if split.cardinality() < 0 and seconds >= due:
            due *= 2
            _log.warning(
                "%s.evaluation() does not say how many batches it has. After %s batches and %.0f "
                "s it has not ended yet, and memory holds all of these batches. If it never ends, "
                "limit it with .take(batches).",
                *(name, f"{number:,}", seconds),
            )


def infer_batch_spec(pipeline: Any, examples: int) -> Spec:
    """Returns the spec of a training split's batches, with another size, and float32 for float64.

    Args:
        pipeline: the training split.
        examples: the batch size of the spec.
    """
    batches = starting_at(pipeline, 0)
    spec = batches.element_spec
    if any(None in part.shape[1:] for part in tf.nest.flatten(spec)):
        shapes = [part.shape for part in _inspect_first(batches, "training()")]
        spec = tf.nest.pack_sequence_as(
            spec, [tf.TensorSpec(s, p.dtype) for s, p in zip(shapes, tf.nest.flatten(spec))]
        )

    def resize_part(part: Any) -> tf.TensorSpec:
        dtype = tf.float32 if part.dtype == tf.float64 else part.dtype
        return tf.TensorSpec((examples, *part.shape[1:]), dtype)

    return tf.nest.map_structure(resize_part, spec)


def starting_at(pipeline: Any, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
    """Returns the endless batches from a step on; see `tftpu.input_pipelines.starting_at`."""
    if hasattr(pipeline, "starting_at"):
        return pipeline.starting_at(step, host, hosts)
    endless = pipeline.cardinality() == tf.data.INFINITE_CARDINALITY
    return (pipeline if endless else pipeline.repeat()).skip(step)


def count_steps(data: DataConfig, pipeline: Any) -> int:
    """Returns the number of batches in an epoch; see `tftpu.input_pipelines.steps_per_epoch`."""
    if hasattr(pipeline, "count"):
        return math.ceil(pipeline.count / pipeline.global_batch_size)
    batches = int(pipeline.cardinality()) if isinstance(pipeline, tf.data.Dataset) else -2
    if batches < 0:
        length = "never ends" if batches == tf.data.INFINITE_CARDINALITY else "has no known length"
        raise UserError(
            "train.epochs needs the number of examples in an epoch, but the data set that "
            f"{type(data).__name__}.training() returns {length}. Set train.steps instead, remove "
            ".repeat(), or state the length with "
            ".apply(tf.data.experimental.assert_cardinality(BATCHES))."
        )
    return batches


def _inspect_first(dataset: tf.data.Dataset, where: str) -> list[Any]:
    """Returns the flat tensors of the first batch, or their specs if all shapes are static."""
    parts = tf.nest.flatten(dataset.element_spec)
    if any(part.shape.rank == 0 for part in parts):
        raise UserError(f"{where} returns single examples: end the data set with .batch(…).")
    if all(part.shape.is_fully_defined() for part in parts):
        return parts
    for batch in dataset.take(1):
        return tf.nest.flatten(batch)
    raise UserError(f"{where} returns an empty data set.")


def _has_end_within(dataset: tf.data.Dataset, batches: int) -> bool:
    """Returns whether a data set has at most `batches` batches."""
    return not any(True for _ in dataset.skip(batches).take(1))


def _describe_value(found: Any) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"
