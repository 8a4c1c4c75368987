"""Records to predict: their features, and each record's file and number in that file."""

import dataclasses
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets.arrays import to_device_array
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Feature, Manifest
from tftpu.input_pipelines.pipeline import Parse, Pipeline, RecordSource
from tftpu.input_pipelines.reading import counted, image_files, shards
from tftpu.input_pipelines.reading.indexed import IndexedRecords
from tftpu.input_pipelines.reading.shards import Shards
from tftpu.input_pipelines.reading.streamed import Streamed
from tftpu.input_pipelines.tensors import Batch, Tensor
from tftpu.storage import files

_log = logging.getLogger(__name__)

_NO_FIELDS = (
    "it has none to keep. TFRecord files and BigQuery tables have fields, Texts have 'text', and "
    "the splits of Images and of StreamedImages have 'label'. A data class of your own has none"
)

Places = Callable[[range], tuple[list[str], list[int]]]
Fields = Callable[[range, Sequence[str]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class UnlabelledRecords:
    """Records to predict, in an order that is the same at every call.

    Args:
        count: number of records.
        identity: a hash that changes with the records.
        features: a function that takes ranges of record numbers and returns a dataset of their
            features, in complete batches; the last batch of a range repeats its last record.
        places: a function that maps a range of records to the file of each and to its number in
            that file; the numbers are [] if each file is one record.
        names: the names of the fields that can be kept beside a prediction.
        fields: a function that returns these fields of a range of records; None: there are none.
        skipped: the reasons why records were skipped, by record number; filled while reading.
        classes: the class names by the class ids in the labels; {}: those of the run's data.
    """

    count: int
    identity: str
    features: Callable[[Sequence[range]], tf.data.Dataset]
    places: Places
    names: Sequence[str] = ()
    fields: Fields | None = None
    skipped: Mapping[int, str] = dataclasses.field(default_factory=dict)
    classes: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def read_fields(self, numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns fields of a range of records by name: arrays, or lists of texts.

        Raises:
            UserError: the records have no field with one of the names.
        """
        for name in names:
            if name not in self.names:
                has = f"it has {sorted(self.names)}" if self.names else _NO_FIELDS
                raise UserError(
                    f"The input has no field {name!r}: {has}. Predictions are in the order of the "
                    "input and name the file and, if a file holds several records, the number of "
                    "the record, from 0: use these to join other columns."
                )
        return self.fields(numbers, names) if self.fields and names and numbers else {}


def build_record_options(context: DataContext) -> Streamed:
    """Returns pipeline options for prediction, which skips bad records only if allowed."""
    return Streamed(
        on_bad_record="skip" if context.skip_bad else "raise", max_bad_records=sys.maxsize
    )


def open_shards(
    where: str, features: dict[str, Feature] | None = None, compression: str = ""
) -> tuple[Manifest, Shards]:
    """Returns the manifest of TFRecord shards, and the records of one split or of all splits.

    Args:
        where: the address, FOLDER or FOLDER:SPLIT.
        features: the features of a record, for a folder without a manifest; empty: inferred from
            its first record.
        compression: "GZIP", for a folder without a manifest; "": detected from the files.

    Raises:
        UserError: there is no such data set or split.
    """
    folder, colon, split = where.rpartition(":")
    if not colon or "/" in split:
        folder, split = where, ""
    found = counted.read_manifest(folder, split, features or None, compression)
    if not split:
        every = tuple(shard for one in found.splits.values() for shard in one)
        found = dataclasses.replace(found, splits={"": every})
    return found, shards.from_manifest(found, split)


def from_shards(
    source: Shards, pipeline: Pipeline, features: Mapping[str, Feature] | None = None
) -> UnlabelledRecords:
    """Returns the records of TFRecord shards.

    Args:
        source: the source of the records.
        pipeline: a pipeline that reads `source`; its `finish` returns features without labels.
        features: the features of a record; all but images can be written beside predictions.
            None: unknown.
    """
    known = {name: f for name, f in (features or {}).items() if f.encoding != "image"}
    stored = _find_features(source) if features else {}
    if manifest.SOURCE in stored:  # `tftpu data convert` writes it, but manifests do not list it
        known.setdefault(manifest.SOURCE, stored[manifest.SOURCE])

    def collect_fields(numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        return _collect_fields(source, known, numbers, names, pipeline.skipped)

    state = [(p.path, p.examples, p.bytes, _read_change_time(p.path)) for p in source.pieces]
    return UnlabelledRecords(
        source.count,
        _hash(state),
        pipeline.read_ranges,
        source.locate_records,
        tuple(known),
        collect_fields,
        pipeline.skipped,
    )


def from_arrays(
    features: Any,
    context: DataContext,
    name: str,
    columns: Mapping[str, Any] | None = None,
    finish: Callable[[Any], Any] = lambda batch: batch,
) -> UnlabelledRecords:
    """Returns the examples of arrays in memory as records of one file.

    Args:
        features: NumPy arrays, nested as the model's inputs.
        context: the context of the run, which sets the batch size.
        name: the file name to report for the records.
        columns: fields to offer for output, by name: arrays (examples, ...).
        finish: a function that turns a batch of the arrays into the model's inputs.

    Raises:
        UserError: the arrays are empty or of different lengths, or no device supports their dtype.
    """
    arrays = tf.nest.map_structure(to_device_array, features)
    parts = tf.nest.flatten(arrays)
    lengths = sorted({len(part) if part.ndim else 0 for part in parts})
    if len(lengths) > 1:
        raise UserError(
            f"The features of {name!r} are arrays of {', '.join(map(str, lengths))} examples: all "
            "must hold the same number of examples."
        )
    if not any(lengths):
        raise UserError(f"There are no records in {name!r}: name an input with at least one.")
    held = tf.nest.map_structure(tf.constant, arrays)
    size, known = context.global_batch_size, columns or {}

    def batch(begin: Tensor, last: Tensor) -> Any:
        numbers = tf.minimum(begin + tf.range(size, dtype=tf.int64), last - 1)
        return finish(tf.nest.map_structure(lambda part: tf.gather(part, numbers), held))

    def gather_batches(ranges: Sequence[range]) -> tf.data.Dataset:
        begins = [(begin, r.stop) for r in ranges for begin in range(r.start, r.stop, size)]
        numbers = np.array(begins, np.int64).reshape(-1, 2)
        drawn = tf.data.Dataset.from_tensor_slices((numbers[:, 0], numbers[:, 1]))
        return drawn.map(batch, tf.data.AUTOTUNE, deterministic=True)

    def locate_records(numbers: range) -> tuple[list[str], list[int]]:
        return [name] * len(numbers), list(numbers)

    def slice_fields(numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        return {n: known[n][numbers.start : numbers.stop] for n in names}

    summed = [hashlib.blake2b(part.tobytes()).hexdigest() for part in parts]
    return UnlabelledRecords(
        len(parts[0]), _hash(summed), gather_batches, locate_records, tuple(known), slice_fields
    )


def from_image_files(
    folder: str, pipeline: Callable[[RecordSource, Parse], Pipeline]
) -> UnlabelledRecords:
    """Returns the images of a folder and its subfolders, sorted by name.

    Args:
        folder: local or in a bucket.
        pipeline: see `from_files`.

    Raises:
        UserError: there are no images.
    """
    folder = folder.rstrip("/")
    found, left_out = image_files.sort_images(folder)
    for line in image_files.describe_left_out(left_out):
        _log.warning("%s: %s", folder, line)
    return from_files([(f"{folder}/{name}", size) for name, size in found.items()], pipeline)


def from_files(
    sizes: Sequence[tuple[str, int]],
    pipeline: Callable[[RecordSource, Parse], Pipeline],
    labels: Sequence[int] | None = None,
) -> UnlabelledRecords:
    """Returns files as records, one record for each file.

    Args:
        sizes: the path and the size in bytes of each file, in order.
        pipeline: a function that builds a pipeline from a source and a `parse` function, which
            maps records to {"path": (n,) string}.
        labels: the class id of each file, which can be kept as "label"; None: unknown.
    """
    encoded = [os.fsencode(path) for path, _ in sizes]  # names on a disk need not be UTF-8
    paths = [path.decode(errors="replace") for path in encoded]
    held = tf.constant(encoded)

    def parse(numbers: Tensor) -> Batch:
        return {"path": tf.gather(held, numbers)}

    def locate_records(numbers: range) -> tuple[list[str], list[int]]:
        return paths[numbers.start : numbers.stop], []

    def slice_labels(numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        return {name: np.asarray(labels, np.int64)[numbers] for name in names}

    made = pipeline(IndexedRecords(held), parse)
    state = [(path, size, _read_change_time(name)) for path, (name, size) in zip(paths, sizes)]
    return UnlabelledRecords(
        len(paths),
        _hash(state),
        made.read_ranges,
        locate_records,
        () if labels is None else ("label",),
        slice_labels,
        made.skipped,
    )


def _find_features(source: Shards) -> dict[str, Feature]:
    """Returns the features that the first record holds; {} if it cannot be read."""
    first = tf.constant(0, tf.int64)
    [record], _ = source.read_range(first, first + 1, 1).get_single_element()
    try:
        return example_proto.find_features(record.numpy(), source.pieces[0].path)
    except UserError:  # raised again when the record is read for prediction
        return {}


def _read_change_time(path: str) -> int:
    """Returns a local file's modification time in nanoseconds; 0 for a file in a bucket."""
    return 0 if files.is_remote(path) else os.stat(path).st_mtime_ns


def decode_texts(values: np.ndarray) -> np.ndarray:
    """Converts an array of bytes to an array of texts."""
    return np.vectorize(lambda value: value.decode(errors="replace"), [object])(values)


def _collect_fields(
    source: RecordSource,
    known: Mapping[str, Feature],
    numbers: range,
    names: Sequence[str],
    skipped: Mapping[int, str],
) -> Mapping[str, Any]:
    """Reads records again and returns some of their fields; 0 or "" for skipped records."""
    first, last = (tf.constant(n, tf.int64) for n in (numbers.start, numbers.stop))
    records, _ = source.read_range(first, last, len(numbers)).get_single_element()
    good = np.array([number not in skipped for number in numbers])
    parse = example_proto.build_parser({name: known[name] for name in names})
    places = source.describe_records(tf.range(first, last))[good]
    try:
        values = parse(tf.boolean_mask(records, good), places)
    except tf.errors.InvalidArgumentError as error:
        raise UserError(f"{', '.join(names)} cannot be kept: {error.message}") from error
    found = {}
    for name, value in values.items():
        array = np.full((len(numbers), *value.shape[1:]), b"" if value.dtype == tf.string else 0)
        array = array.astype(value.numpy().dtype)
        array[good] = value.numpy()
        found[name] = decode_texts(array) if value.dtype == tf.string else array
    return found


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
