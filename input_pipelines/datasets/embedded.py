"""The data sets that come with tftpu, read without TFDS once they are prepared.

TFDS takes about a second to import. TensorFlow alone can read a prepared data set, which has one
TFRecord file for each split, and a `dataset_info.json`.
"""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tftpu.input_pipelines.reading import damage
from tftpu.input_pipelines.tensors import Batch
from tftpu.installation import find_cache_folder
from tftpu.storage import files


@dataclasses.dataclass(frozen=True)
class EmbeddedLayout:
    """The layout of an embedded data set.

    Args:
        config: the subfolder of a configuration in the data set's folder; "" without subfolders.
        version: the version of the data set.
        features: the names of the features, with the dtypes in which a record stores them.
        images: the features that are PNG images, with their numbers of channels.
    """

    config: str
    version: str
    features: dict[str, tf.DType]
    images: dict[str, int]


EMBEDDED = {
    "digits": EmbeddedLayout("", "1.0.0", {"image": tf.string, "label": tf.int64}, {"image": 1}),
    "python_source": EmbeddedLayout(
        f"python-{platform.python_version()}", "1.0.0", {"text": tf.string}, {}
    ),
}


def load_split(name: str, data_dir: str | None, split: str) -> Batch | None:
    """Returns all examples of a split in order, as NumPy arrays by feature name.

    Returns None if TFDS is needed: the data set is not embedded, it is not prepared in a local
    folder, or `split` is not stored as one file (for example, "train[:90%]" is not).

    Args:
        name: the name of the data set.
        data_dir: folder of prepared data; None: the cache folder.
        split: name of the split.
    """
    folder = data_dir or find_cache_folder("data")
    if name not in EMBEDDED or files.is_remote(folder):
        return None
    layout = EMBEDDED[name]
    place = Path(folder, name, layout.config, layout.version)
    path = place / f"{name}-{split}.tfrecord-00000-of-00001"
    count = _count(place, split)
    if not count or not os.path.exists(path):
        return None
    damage.check_lengths([str(path)], [count])
    records = tf.data.TFRecordDataset(str(path)).batch(count).get_single_element()
    features = {n: tf.io.FixedLenFeature((), dtype) for n, dtype in layout.features.items()}
    examples: dict[str, Any] = tf.io.parse_example(records, features)
    columns = {feature: column.numpy() for feature, column in examples.items()}
    for feature, channels in layout.images.items():
        images = [tf.io.decode_png(image, channels).numpy() for image in columns[feature]]
        columns[feature] = np.stack(images)
    return columns


def _count(place: Path, split: str) -> int:
    """Returns a split's number of examples from TFDS's metadata; 0 if unknown or in many shards."""
    try:
        info = json.loads((place / "dataset_info.json").read_text())
        lengths = {found["name"]: found["shardLengths"] for found in info["splits"]}
        (length,) = lengths[split]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return int(length)
