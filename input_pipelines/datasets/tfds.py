"""TFDS data sets by name: the embedded ones of tftpu, and any that TFDS knows."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.reading.shards import Piece, Shards, checked

EMBEDDED = ("digits", "python_source")

# TFDS warns of a data set that is not prepared, where an error of ours says it.
logging.getLogger("absl").addFilter(lambda r: not r.getMessage().startswith("Variant folder"))


def cache_folder() -> str:
    """Where prepared data lie: $TFTPU_CACHE, or `tftpu/data` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(os.environ.get("TFTPU_CACHE") or Path(home) / "tftpu" / "data")


def prepared(name: str, data_dir: str | None, download: bool = False) -> tfds.core.DatasetBuilder:
    """The builder of a data set that is ready to be read. Never touches the network unless told to.

    An embedded data set is made on first use. Any other has to be prepared before, by TFDS.

    Args:
        name: "digits", "python_source", or a name that TFDS knows, as "imagenet2012".
        data_dir: where it lies, local or `gs://`; None: the cache folder.
        download: whether TFDS may download and prepare what is not there.

    Raises:
        UserError: an unknown data set, or one that is not prepared.
    """
    data_dir = data_dir or cache_folder()
    if name in EMBEDDED:
        builder = _embedded(name, data_dir)
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
        return builder
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except tfds.core.DatasetNotFoundError as error:
        known = [*EMBEDDED, *tfds.list_builders()]
        near = did_you_mean(name, known)
        near = near if "Did you mean" in near else " tfds.list_builders() lists what TFDS has."
        raise UserError(f"There is no data set {name!r}.{near}") from error
    if not builder.is_prepared() and download:
        builder.download_and_prepare()
    if not builder.is_prepared():
        raise UserError(
            f"The data set {name!r} is not prepared in {data_dir}: run `tfds build {name} "
            f"--data_dir={data_dir}` on a machine that can download it (it says which files it "
            "cannot fetch by itself), or name the folder it lies in with "
            "--config.data.data_dir=DIR."
        )
    return builder


def count(builder: tfds.core.DatasetBuilder, split: str) -> int:
    """Examples in a split.

    Raises:
        UserError: there is no such split, or it is empty.
    """
    try:
        examples = builder.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The data set {builder.name!r} has no split {split!r}."
            f"{did_you_mean(split, list(builder.info.splits))}"
        ) from error
    if not examples:
        raise UserError(f"The split {split!r} of the data set {builder.name!r} is empty.")
    return examples


def shards(builder: tfds.core.DatasetBuilder, split: str, **options) -> Shards:
    """The records of a split, as "train", "train[:90%]" or "train+test".

    Raises:
        UserError: no such split, an empty one, or files that are no TFRecord.
    """
    count(builder, split)
    kind = builder.info.file_format.value
    if kind != "tfrecord":
        raise UserError(
            f"The data set {builder.name!r} is prepared as {kind}, and read here as tfrecord: "
            f"prepare it again with `tfds build {builder.name} --file_format=tfrecord`."
        )
    pieces = [
        Piece(str(part.filename), part.examples_in_shard, part.skip)
        if part.take == -1
        else Piece(str(part.filename), part.take, part.skip)
        for part in builder.info.splits[split].file_instructions
    ]
    return Shards(checked(pieces), **options)


def image_and_label(builder: tfds.core.DatasetBuilder) -> tuple[str, str]:
    """The names of the image and of the class of an example.

    Raises:
        UserError: it has not one of each.
    """
    named = {
        kind: [name for name, feature in builder.info.features.items() if isinstance(feature, kind)]
        for kind in (tfds.features.Image, tfds.features.ClassLabel)
    }
    if any(len(names) != 1 for names in named.values()):
        raise UserError(
            f"The data set {builder.name!r} has the features {sorted(builder.info.features)}: one "
            "image and one class label are expected."
        )
    return tuple(names[0] for names in named.values())


def in_memory(dataset: tf.data.Dataset) -> Any:
    """All examples of a dataset as NumPy arrays, nested as they are; for small data sets."""
    examples = list(dataset.as_numpy_iterator())
    return tf.nest.map_structure(lambda *parts: np.stack(parts), *examples)


def _embedded(name: str, data_dir: str) -> tfds.core.DatasetBuilder:
    if name == "digits":
        from tftpu.input_pipelines.datasets.digits import Digits

        return Digits(data_dir=data_dir)
    from tftpu.input_pipelines.datasets.python_source import PythonSource

    return PythonSource(data_dir=data_dir)
