"""Records to predict: their features, and the file and the place that each comes from."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.datasets.arrays import device_array
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Feature, Manifest
from tftpu.input_pipelines.pipeline import Finish, Parse, Pipeline, RecordSource
from tftpu.input_pipelines.reading import counted, listing, shards
from tftpu.input_pipelines.reading.image_files import SUFFIXES
from tftpu.input_pipelines.reading.indexed import Indexed
from tftpu.input_pipelines.reading.shards import Shards
from tftpu.input_pipelines.reading.streamed import Streamed
from tftpu.input_pipelines.tensors import Batch, Tensor
from tftpu.storage import files

EVALUATION, TRAINING = "evaluation", "training"

Places = Callable[[range], tuple[list[str], list[int]]]
Fields = Callable[[range, Sequence[str]], Mapping[str, Any]]


def address(text: str, data: str, kinds: Sequence[str]) -> tuple[str, str]:
    """Returns the kind of an address of records, and what it names.

    Args:
        text: KIND:WHAT, or the name of a split of the run's own data.
        data: class of the data of the run, for errors.
        kinds: that it can read, such as "images", besides its splits.

    Raises:
        UserError: it is none of these.
    """
    kind, _, what = text.partition(":")
    if (kind in kinds and what) or text in (EVALUATION, TRAINING):
        return kind, what
    allowed = [*(f"{name}:..." for name in kinds), EVALUATION, TRAINING]
    raise UserError(
        f"The input {text!r} is none that data of the class {data} can be read from: it takes "
        f"{', '.join(allowed)}.{did_you_mean(kind, [*kinds, EVALUATION, TRAINING])}"
    )


@dataclasses.dataclass(frozen=True)
class Unlabelled:
    """Records to predict, in an order that is the same at every call.

    Args:
        pipeline: of the records; its `finish` returns features alone.
        identity: a text that is another one for other records.
        places: returns the files of a range of records, and their numbers in these.
        names: of the fields that can be kept beside a prediction.
        fields: returns those fields of a range of records; None: there are none.
    """

    pipeline: Pipeline
    identity: str
    places: Places
    names: Sequence[str] = ()
    fields: Fields | None = None

    @property
    def count(self) -> int:
        """The number of records."""
        return self.pipeline.count

    @property
    def skipped(self) -> Mapping[int, str]:
        """The reasons why records were skipped, by number."""
        return self.pipeline.skipped

    def features(self, ranges: Sequence[range]) -> tf.data.Dataset:
        """Returns the features of ranges of records; see `Pipeline.of_ranges`."""
        return self.pipeline.of_ranges(ranges)

    def kept(self, numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns fields of a range of records by name: arrays, or lists of texts.

        Raises:
            UserError: there is no such field.
        """
        for name in names:
            if name not in self.names:
                has = f"it has {sorted(self.names)}" if self.names else "there are none to keep"
                raise UserError(f"The input has no field {name!r}: {has}.")
        return self.fields(numbers, names) if self.fields and names else {}


def shards_in(
    where: str, features: dict[str, Feature] | None = None, compression: str = ""
) -> tuple[Manifest, Shards]:
    """Returns a data set of TFRecord shards, and the records of all its splits, or of one.

    Args:
        where: FOLDER, or FOLDER:SPLIT.
        features: of a record, for a folder without a manifest; empty: it needs one.
        compression: "" or "GZIP", for a folder without a manifest.

    Raises:
        UserError: there is no such data set or split.
    """
    folder, colon, split = where.rpartition(":")
    if not colon or "/" in split:
        folder, split = where, ""
    if features and not files.exists(files.join(folder, manifest.NAME)):
        found = counted.described(folder, split, features, compression)
    else:
        found = manifest.read(folder)
    if not split:
        every = tuple(shard for one in found.splits.values() for shard in one)
        found = dataclasses.replace(found, splits={"": every})
    return found, shards.of_manifest(found, split)


def of_shards(
    source: Shards, pipeline: Pipeline, features: Mapping[str, Feature] | None = None
) -> Unlabelled:
    """Returns the records of TFRecord shards.

    Args:
        source: of the records.
        pipeline: over the source; its `finish` returns features alone.
        features: of a record, of which any but images can be kept; None: they are not known.
    """
    known = {name: f for name, f in (features or {}).items() if f.encoding != "image"}

    def fields(numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        return _fields(source, known, numbers, names, pipeline.skipped)

    state = [(piece.path, piece.examples, piece.bytes) for piece in source.pieces]
    return Unlabelled(pipeline, _hash(state), source.places, tuple(known), fields)


def of_arrays(
    features: Any,
    context: DataContext,
    name: str,
    columns: Mapping[str, Any] | None = None,
    finish: Finish = lambda batch, seeds: batch,
) -> Unlabelled:
    """Returns the examples of arrays in memory as records of one file.

    Args:
        features: NumPy arrays, nested as the model's inputs.
        context: of the run.
        name: given as their file.
        columns: fields that can be kept, arrays of as many examples, by name.
        finish: makes the model's inputs of a batch of the arrays.

    Raises:
        UserError: the arrays are empty, or no device supports their dtype.
    """
    arrays = tf.nest.map_structure(device_array, features)
    parts = tf.nest.flatten(arrays)
    source = Indexed(tf.fill([len(parts[0])], name))
    held = tf.nest.map_structure(tf.constant, arrays)

    def parse(numbers: Tensor) -> Any:
        return tf.nest.map_structure(lambda part: tf.gather(part, numbers), held)

    def places(numbers: range) -> tuple[list[str], list[int]]:
        return [name] * len(numbers), list(numbers)

    def fields(numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        return {n: known[n][numbers.start : numbers.stop] for n in names}

    known = columns or {}
    pipeline = Pipeline(source, Streamed(), context, parse, finish)
    summed = [hashlib.blake2b(np.ascontiguousarray(part)).hexdigest() for part in parts]
    return Unlabelled(pipeline, _hash(summed), places, tuple(known), fields)


def of_image_files(folder: str, pipeline: Callable[[RecordSource, Parse], Pipeline]) -> Unlabelled:
    """Returns the images of a folder and those below it, sorted by name.

    Args:
        folder: local or in a bucket.
        pipeline: as for `of_files`.

    Raises:
        UserError: there are no images.
    """
    folder = folder.rstrip("/")
    found = listing.tree(folder)
    sizes = {f"{folder}/{n}": found[n] for n in found if n.lower().endswith(SUFFIXES)}
    if not sizes:
        raise UserError(f"There are no images ({', '.join(SUFFIXES)}) in {folder}.")
    return of_files(sizes, pipeline)


def of_files(
    sizes: Mapping[str, int], pipeline: Callable[[RecordSource, Parse], Pipeline]
) -> Unlabelled:
    """Returns files as records, one in each.

    Args:
        sizes: bytes of the files by path, in order.
        pipeline: returns the pipeline over a source, whose records `parse` makes {"path"} of.
    """
    paths = list(sizes)
    held = tf.constant(paths)

    def parse(numbers: Tensor) -> Batch:
        return {"path": tf.gather(held, numbers)}

    def places(numbers: range) -> tuple[list[str], list[int]]:
        return paths[numbers.start : numbers.stop], [0] * len(numbers)

    return Unlabelled(pipeline(Indexed(held), parse), _hash(sizes), places)


def texts(values: np.ndarray) -> np.ndarray:
    """Returns an array of bytes as one of texts."""
    return np.vectorize(lambda value: value.decode(errors="replace"), [object])(values)


def _fields(
    source: RecordSource,
    known: Mapping[str, Feature],
    numbers: range,
    names: Sequence[str],
    skipped: Mapping[int, str],
) -> Mapping[str, Any]:
    """Returns fields of records that were read before; 0 or "" for those that were skipped."""
    first, last = (tf.constant(n, tf.int64) for n in (numbers.start, numbers.stop))
    records, _ = source.between(first, last).batch(len(numbers)).get_single_element()
    good = np.array([number not in skipped for number in numbers])
    parse = example_proto.parser({name: known[name] for name in names})
    values = parse(tf.boolean_mask(records, good), tf.fill([int(good.sum())], ""))
    found = {}
    for name, value in values.items():
        array = np.full((len(numbers), *value.shape[1:]), b"" if value.dtype == tf.string else 0)
        array = array.astype(value.numpy().dtype)
        array[good] = value.numpy()
        found[name] = texts(array) if value.dtype == tf.string else array
    return found


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
