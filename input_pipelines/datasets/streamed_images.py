"""Images with a class each, read, decoded and augmented while training."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.augment import image_ops, mix
from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.datasets.indexed import Indexed
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.pipeline import Pipeline, Source, options_of
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.sources import StreamedImages
from tftpu.storage import files


def training(data: StreamedImages, seed: int) -> Pipeline:
    """Shuffled, augmented training images; see `pipeline` for what is kept exact."""
    source, parse = _source(data, data.train_split)
    prepare = image_ops.training(data.augment, data.image_size, data.channels)
    return Pipeline(
        source,
        data.global_batch_size,
        parse,
        _finish(data, mix.batches(data.augment, data.num_classes, data.space_to_depth)),
        example=lambda example, seed: _chosen(prepare(_read(example), seed)),
        seed=seed,
        pairs=mixes(data),
        **options_of(data),
    )


def evaluation(data: StreamedImages) -> tf.data.Dataset:
    """Every evaluation image once."""
    source, parse = _source(data, data.eval_split)
    prepare = image_ops.evaluation(data.augment, data.image_size, data.channels)

    def finish(batch: dict, seeds: tf.Tensor) -> dict:
        image = mix.to_depth(batch["image"]) if data.space_to_depth else batch["image"]
        label = tf.one_hot(batch["label"], data.num_classes) if mixes(data) else batch["label"]
        return {"image": image, "label": label}

    return Pipeline(
        source,
        data.global_batch_size,
        parse,
        _finish(data, finish),
        example=lambda example, _: _chosen(prepare(_read(example))),
        **options_of(data),
    ).once()


def batch_spec(data: StreamedImages, examples: int) -> Any:
    """(images, labels) of a batch."""
    size, channels = data.image_size, data.channels
    shape = (size // 2, size // 2, 4 * channels) if data.space_to_depth else (size, size, channels)
    images = tf.TensorSpec((examples, *shape), tf.as_dtype(data.image_dtype))
    if mixes(data):
        return images, tf.TensorSpec((examples, data.num_classes), tf.float32)
    return images, tf.TensorSpec((examples,), tf.int32)


def class_names(data: StreamedImages) -> list[str] | None:
    """The names of the classes by their numbers; None where the data has none."""
    if data.format in ("folder", "index"):
        return _listed(data, data.train_split)[1]
    if data.format == "tfrecord":
        return manifest.read(data.data_dir).about.get("classes")
    builder = tfds.prepared(data.name, data.data_dir, data.download)
    return builder.info.features[tfds.image_and_label(builder)[1]].names


def mixes(data: StreamedImages) -> bool:
    """Whether labels are shares of the classes, (batch, classes), rather than class ids."""
    return bool(data.augment.mixup or data.augment.cutmix)


def _source(data: StreamedImages, split: str) -> tuple[Source, Callable]:
    """The records of a split, and what makes {"image", "label"} of them.

    Raises:
        UserError: no such split, or the classes are not as many as the config says.
    """
    if data.format in ("folder", "index"):
        return _files(data, split)
    if data.format == "tfds":
        builder = tfds.prepared(data.name, data.data_dir, data.download)
        source = tfds.shards(builder, split, shuffle=data.shuffle)
        image, label = tfds.image_and_label(builder)
        features = {image: Feature("string", (), "image")}
        features[label] = Feature("int32", (), "list", builder.info.features[label].num_classes)
    else:
        found = manifest.read(data.data_dir)
        source = shards.of_manifest(found, split, cache.of(data), shuffle=data.shuffle)
        image, label = "image", "label"
        features = {name: f for name, f in found.features.items() if name in (image, label)}
        if set(features) != {image, label} or features[image].encoding != "image":
            raise UserError(
                f"The data set in {data.data_dir} has {sorted(found.features)}: images need the "
                "features 'image', of encoding 'image', and 'label'."
            )
    _check_classes(data, features[label].num_classes)
    parse = example_proto.parser(features)

    def parsed(serialized: tf.Tensor) -> dict:
        example = parse(serialized, tf.fill(tf.shape(serialized), ""))
        return {"image": example[image], "label": example[label]}

    return source, parsed


def _files(data: StreamedImages, split: str) -> tuple[Indexed, Callable]:
    found, names = _listed(data, split)
    if split != data.train_split and names != _listed(data, data.train_split)[1]:
        raise UserError(
            f"The splits {data.train_split!r} and {split!r} in {data.data_dir} have not the same "
            "classes, so their numbers would differ: give every split a folder for each class, "
            "or class numbers in the index."
        )
    rows = [row for part in found.parts for row in part]
    _check_classes(data, found.features["label"].num_classes)
    paths = tf.constant([row[0] for row in rows])
    labels = tf.constant([row[1] for row in rows], tf.int32)

    def parse(numbers: tf.Tensor) -> dict:
        return {"path": tf.gather(paths, numbers), "label": tf.gather(labels, numbers)}

    return Indexed(paths), parse


def _listed(data: StreamedImages, split: str) -> tuple[Any, Any]:
    """The files of a split, and the names of their classes if they have any."""
    from tftpu.input_pipelines.convert import parts

    address = f"images:{files.join(data.data_dir, split)}"
    if data.format == "index":
        index = [files.join(data.data_dir, f"{split}.{end}") for end in ("csv", "jsonl")]
        there = [path for path in index if files.exists(path)]
        if len(there) != 1:
            raise UserError(
                f"{'Both' if there else 'Neither'} of {' and '.join(index)} "
                f"{'are' if there else 'is'} there: one index of the split {split!r} is expected."
            )
        address = f"index:{there[0]}"
    found = parts.source(address, parts.Options())
    return found, found.about.get("classes")


def _check_classes(data: StreamedImages, found: int) -> None:
    if found and found != data.num_classes:
        raise UserError(
            f"The data have {found} classes, and data.num_classes is {data.num_classes}: the model needs "
            f"as many as the data; use --config.data.num_classes={found}."
        )


def _read(example: dict) -> dict:
    """With the image's bytes, where only its path is known."""
    if "path" not in example:
        return example
    return {"image": tf.io.read_file(example["path"]), "label": example["label"]}


def _chosen(example: dict) -> dict:
    return {"image": example["image"], "label": example["label"]}


def _finish(data: StreamedImages, mixed: Callable) -> Callable:
    def finish(batch: dict, seeds: tf.Tensor) -> tuple:
        batch = mixed(batch, seeds)
        images = batch["image"]
        if data.image_dtype != "uint8":  # about zero mean and unit variance
            images = tf.cast(tf.cast(images, tf.float32) / 64.0 - 1.2, data.image_dtype)
        return images, batch["label"]

    return finish
