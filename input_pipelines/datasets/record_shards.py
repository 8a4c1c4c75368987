"""TFRecord shards of any features, read while training."""

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import batches
from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Manifest, Shard, parse_features
from tftpu.input_pipelines.pipeline import Pipeline
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.reading.cache_folder import cache_folder
from tftpu.input_pipelines.tensors import Batch, Spec, Tensor
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Records


def training(data: "Records", context: DataContext) -> Pipeline:
    """Returns shuffled examples; see `pipeline` for the exact guarantees."""
    return _pipeline(data, data.train_split, context)


def evaluation(data: "Records", context: DataContext) -> tf.data.Dataset:
    """Returns every example once."""
    return _pipeline(data, data.eval_split, context).once()


def batch_spec(data: "Records", examples: int) -> Spec:
    """Returns the spec of a batch: (features, labels[, weights])."""
    found = parse_features(data.spec) or manifest.read(data.data_dir or "").features
    return batches.spec(found, data.features, data.label, data.weight, examples=examples)


def described(data: "Records", split: str) -> Manifest:
    """Returns the manifest of the data: from its folder, or made by reading its files once.

    Raises:
        UserError: neither a manifest nor a spec, or no files of the split.
    """
    folder = data.data_dir or ""
    if files.exists(files.join(folder, manifest.NAME)):
        return manifest.read(folder)
    if not data.spec:
        raise UserError(
            f"{folder} has no {manifest.NAME}: describe its records in data.spec, as in "
            "('x: float32[28,28]', 'y: int64 num_classes=10')."
        )
    names = [name for name in files.names_in(folder) if name.startswith(split)]
    if not names:
        raise UserError(f"There is no file {files.join(folder, split)}*.")
    with ThreadPoolExecutor(8) as pool:
        paths = [files.join(folder, name) for name in names]
        found = tuple(pool.map(lambda path: _counted(path, data.compression), paths))
    return Manifest(folder, parse_features(data.spec), {split: found}, data.compression)


def _pipeline(data: "Records", split: str, context: DataContext) -> Pipeline:
    found = described(data, split)
    roles = (data.features, data.label, data.weight)
    batches.spec(found.features, *roles, examples=1)  # raises for missing features and strings
    wanted = (*data.features, data.label, data.weight)
    features = {name: f for name, f in found.features.items() if name in wanted}
    parse = example_proto.parser(features)

    def parsed(records: Tensor) -> Batch:
        return batches.narrowed(parse(records, tf.fill(tf.shape(records), "")), features)

    return Pipeline(
        shards.of_manifest(found, split, cache.of(data), data.shuffle),
        data,
        context,
        parsed,
        lambda values, seeds: batches.arranged(values, *roles),
    )


def _counted(path: str, compression: str) -> Shard:
    """Scans a file once; later calls read the result from the cache folder."""
    size = files.size(path)
    changed = os.path.getmtime(path) if not files.is_remote(path) else 0
    key = json.dumps([os.path.abspath(path) if changed else path, size, changed, compression])
    note = files.join(cache_folder(), "counted", hashlib.sha256(key.encode()).hexdigest() + ".json")
    if files.exists(note):
        kept = json.loads(files.read(note))
        return Shard(**{**kept, "offsets": tuple(kept["offsets"])})
    found = dataclasses.replace(tfrecord.scan(path, compression), name=os.path.basename(path))
    files.write_whole(note, json.dumps(dataclasses.asdict(found)).encode())
    return found
