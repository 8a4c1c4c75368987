"""Helpers for tests of conversions."""

from pathlib import Path

import tensorflow as tf

from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest


def silent(*_: object) -> None:
    """Ignores the messages of a conversion."""


def of_text(source: str, folder: Path | str) -> Conversion:
    """Returns a conversion of text into three shards of short sequences."""
    return Conversion(source, str(folder), ReadOptions(context=63), min_shards=3)


def content(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of a folder's files, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def examples(folder: Path | str, split: str = "train") -> list[list[tf.train.Example]]:
    """Reads a split with TensorFlow: a list for each shard, in the manifest's order."""
    found = manifest.read(str(folder))
    return [
        [
            tf.train.Example.FromString(record)
            for record in tf.data.TFRecordDataset(
                found.build_path(shard), found.compression
            ).as_numpy_iterator()
        ]
        for shard in found.list_shards(split)
    ]


def one(example: tf.train.Example, name: str) -> bytes | int:
    """Returns the value of a feature that has one."""
    feature = example.features.feature[name]
    return (feature.bytes_list.value or feature.int64_list.value)[0]
