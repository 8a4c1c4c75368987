"""TFRecord shards with any features, read during training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines import addresses, unlabelled
from tftpu.input_pipelines.datasets import batches
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Manifest, parse_features
from tftpu.input_pipelines.pipeline import Parse, Pipeline
from tftpu.input_pipelines.reading import cache, counted, shards
from tftpu.input_pipelines.tensors import Batch, Spec, Tensor
from tftpu.input_pipelines.unlabelled import UnlabelledRecords
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Records

_EXAMPLE = "'x: float32[28,28]', 'y: int64 num_classes=10'"


def build_training(data: "Records", context: DataContext) -> Pipeline:
    """Returns shuffled examples; see `reading.order` for the order."""
    return _build_pipeline(data, data.train_split, context)


def build_evaluation(data: "Records", context: DataContext) -> tf.data.Dataset:
    """Returns a data set of every example, once, in batches."""
    return _build_pipeline(data, data.eval_split, context).iterate_once()


def build_prediction(data: "Records", address: str, context: DataContext) -> UnlabelledRecords:
    """Returns records to predict, of a split or of other shards with the same features."""
    kind, where = addresses.parse_address(address, "Records", data.address_kinds)
    if kind == "tfrecord":
        spec = parse_features(data.spec)
        found, source = unlabelled.open_shards(where, spec, data.compression)
    else:
        split = data.eval_split if kind == addresses.EVALUATION else data.train_split
        found = load_manifest(data, split)
        source = shards.from_manifest(found, split, cache.from_data(data))
    parse = _build_parser(found, data.features)
    pipeline = Pipeline(
        source,
        unlabelled.build_record_options(context),
        context,
        parse,
        lambda values, seeds: batches.arrange_batch(values, data.features, ""),
    )
    return unlabelled.from_shards(source, pipeline, found.features)


def batch_spec(data: "Records", examples: int) -> Spec:
    """Returns the spec of a batch: (features, labels[, weights])."""
    found = parse_features(data.spec) or manifest.read(data.data_dir or "").features
    return batches.build_spec(found, data.features, data.label, data.weight, examples=examples)


def load_manifest(data: "Records", split: str) -> Manifest:
    """Returns the manifest from the data's folder, or makes one by reading the files once.

    Raises:
        UserError: there is neither a manifest nor `data.spec`, or the split has no files.
    """
    folder, spec = data.data_dir or "", parse_features(data.spec)
    is_there = files.exists(folder or ".")
    if is_there and not spec and not files.exists(files.join(folder, manifest.NAME)):
        raise UserError(
            f"{folder} has no {manifest.NAME}: describe its records in data.spec, as in "
            f"({_propose_spec(folder, split)}). For records of images, use StreamedImages."
        )
    return counted.read_manifest(folder, split, spec, data.compression)


def _propose_spec(folder: str, split: str) -> str:
    """Returns the spec of a split's first record, or an example of a spec if that is unknown."""
    try:
        return manifest.describe_features(counted.find_features(folder, split)) or _EXAMPLE
    except UserError:
        return _EXAMPLE


def _build_pipeline(data: "Records", split: str, context: DataContext) -> Pipeline:
    found = load_manifest(data, split)
    roles = (data.features, data.label, data.weight)
    wanted = [name for name in (*data.features, data.label, data.weight) if name]
    return Pipeline(
        shards.from_manifest(found, split, cache.from_data(data), data.shuffle),
        data,
        context,
        _build_parser(found, wanted),
        lambda values, seeds: batches.arrange_batch(values, *roles),
    )


def _build_parser(found: Manifest, wanted: Sequence[str]) -> Parse:
    """Returns the function that turns records into features by name.

    Raises:
        UserError: a feature is missing, or is a string.
    """
    batches.build_spec(found.features, tuple(wanted), "", examples=1)
    features = {name: found.features[name] for name in wanted}
    parse = example_proto.build_parser(features)

    def parse_records(records: Tensor) -> Batch:
        return batches.narrow_dtypes(parse(records, tf.fill(tf.shape(records), "")), features)

    return parse_records
