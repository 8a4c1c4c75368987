"""TFRecord shards of any features, and random ones of the same description."""

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.formats import example_proto, manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest, Shard
from tftpu.input_pipelines.pipeline import Pipeline, options_of
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.sources import Records, features_of
from tftpu.storage import files

_NARROW = {"int64": tf.int32, "uint16": tf.int32}  # what no device needs as wide, or has not


def training(data: Records, seed: int) -> Pipeline:
    """Shuffled examples; see `pipeline` for what is kept exact."""
    return _pipeline(data, data.train_split, seed=seed, **options_of(data))


def evaluation(data: Records) -> tf.data.Dataset:
    """Every example once."""
    return _pipeline(data, data.eval_split, **options_of(data)).once()


def batch_spec(data: Records, examples: int) -> Any:
    """(features, labels[, weights]) of a batch."""
    found = features_of(data.spec) or manifest.read(data.data_dir).features
    return spec(found, (data.features, data.label, data.weight), examples)


def described(data: Records, split: str) -> Manifest:
    """The manifest of the data: its own, or one made by reading its files once.

    Raises:
        UserError: neither a manifest nor a spec, or no files of the split.
    """
    there = files.exists(files.join(data.data_dir, manifest.NAME))
    if there:
        return manifest.read(data.data_dir)
    if not data.spec:
        raise UserError(
            f"{data.data_dir} has no {manifest.NAME}: say with data.spec what a record holds, as "
            "('x: float32[28,28]', 'y: int64 num_classes=10')."
        )
    names = [name for name in files.names_in(data.data_dir) if name.startswith(split)]
    if not names:
        raise UserError(f"There is no file {files.join(data.data_dir, split)}*.")
    with ThreadPoolExecutor(8) as pool:
        paths = [files.join(data.data_dir, name) for name in names]
        found = tuple(pool.map(lambda path: _counted(path, data.compression), paths))
    return Manifest(data.data_dir, features_of(data.spec), {split: found}, data.compression)


def spec(found: dict[str, Feature], roles: tuple, examples: int) -> Any:
    """The batch that `arranged` makes, as `tf.TensorSpec`s."""
    names = (*roles[0], *roles[1:])
    values = {}
    for name in filter(None, names):
        if name not in found:
            raise UserError(f"The data have no feature {name!r}; they have {sorted(found)}.")
        if found[name].dtype == "string":
            raise UserError(
                f"The feature {name!r} is a string, which no device takes: StreamedImages reads "
                "images, and text has to be tokens."
            )
        dtype = _NARROW.get(found[name].dtype, tf.as_dtype(found[name].dtype))
        values[name] = tf.TensorSpec((examples, *found[name].shape), dtype)
    return arranged(values, *roles)


def arranged(values: dict, features: tuple[str, ...], label: str, weight: str = "") -> tuple:
    """(features, labels[, weights]) of values by name; one feature stands alone."""
    chosen = {name: values[name] for name in features}
    batch = [chosen if len(features) > 1 else chosen[features[0]]]
    batch += [values[name] for name in (label, weight) if name]
    return tuple(batch) if len(batch) > 1 else batch[0]


def narrowed(values: dict, found: dict[str, Feature]) -> dict:
    """The values in dtypes of a device.

    Raises:
        tf.errors.InvalidArgumentError: a number that int32 cannot hold.
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


def _pipeline(data: Records, split: str, **options) -> Pipeline:
    found = described(data, split)
    roles = (data.features, data.label, data.weight)
    spec(found.features, roles, 1)
    features = {n: f for n, f in found.features.items() if n in (*data.features, *roles[1:])}
    parse = example_proto.parser(features)
    return Pipeline(
        shards.of_manifest(found, split, cache.of(data), shuffle=data.shuffle),
        data.global_batch_size,
        lambda r: narrowed(parse(r, tf.fill(tf.shape(r), "")), features),
        lambda values, seeds: arranged(values, *roles),
        **options,
    )


def _counted(path: str, compression: str) -> Shard:
    """A shard as its file has it; what was counted once is kept in the cache folder."""
    size = files.size(path)
    changed = os.path.getmtime(path) if not files.is_remote(path) else 0
    key = json.dumps([os.path.abspath(path) if changed else path, size, changed, compression])
    note = files.join(
        tfds.cache_folder(), "counted", hashlib.sha256(key.encode()).hexdigest() + ".json"
    )
    if files.exists(note):
        kept = json.loads(files.read(note))
        return Shard(**{**kept, "offsets": tuple(kept["offsets"])})
    found = dataclasses.replace(tfrecord.scan(path, compression), name=os.path.basename(path))
    files.write_whole(note, json.dumps(dataclasses.asdict(found)).encode())
    return found
