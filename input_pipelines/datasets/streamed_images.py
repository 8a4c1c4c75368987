"""Images with one class each, which are read, decoded and augmented during training."""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError
from tftpu.input_pipelines import addresses, unlabelled
from tftpu.input_pipelines.augment import decode, image_ops, mix
from tftpu.input_pipelines.formats import example_proto, image_records, manifest
from tftpu.input_pipelines.formats.image_records import ImageRecords
from tftpu.input_pipelines.formats.manifest import Feature, Manifest
from tftpu.input_pipelines.pipeline import Finish, Parse, Pipeline, RecordSource
from tftpu.input_pipelines.reading import cache, counted, image_files, image_index, shards
from tftpu.input_pipelines.reading.image_files import ImageFiles
from tftpu.input_pipelines.reading.indexed import IndexedRecords
from tftpu.input_pipelines.reading.listing import decode_path
from tftpu.input_pipelines.reading.shards import Shards
from tftpu.input_pipelines.tensors import Batch, Spec, Tensor
from tftpu.input_pipelines.unlabelled import UnlabelledRecords
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import StreamedImages

_HELD_OUT = 5  # without folders of splits, one in this many images of each class is held out

_log = logging.getLogger(__name__)


def build_training(data: "StreamedImages", context: DataContext) -> Pipeline:
    """Returns shuffled, augmented training images; see `reading.order` for the order."""
    source, parse = _open_source(data, data.train_split)
    prepare = image_ops.build_training_augmentation(data.augment, data.image_size, data.channels)
    return Pipeline(
        source,
        data,
        context,
        parse,
        _build_finish(
            data, mix.build_augmentation(data.augment, data.num_classes, data.space_to_depth)
        ),
        example=lambda example, seed: _select_parts(prepare(_read(example), seed)),
        pairs=has_soft_labels(data),
    )


def build_evaluation(data: "StreamedImages", context: DataContext) -> tf.data.Dataset:
    """Returns a data set of every evaluation image, once, in batches."""
    source, parse = _open_source(data, data.eval_split)
    if data.format == "folder" and _holds_out(data):
        print(
            f"{data.data_dir} has no folder {data.train_split} or {data.eval_split}: one "
            f"in {_HELD_OUT} images of each class, {source.count:,} in all, is held out to "
            "evaluate on",
            flush=True,
        )
    prepare = image_ops.build_evaluation_crop(data.augment, data.image_size, data.channels)

    def finish(batch: Batch, seeds: Tensor) -> Batch:
        image = mix.to_depth(batch["image"]) if data.space_to_depth else batch["image"]
        label = (
            tf.one_hot(batch["label"], data.num_classes)
            if has_soft_labels(data)
            else batch["label"]
        )
        return {"image": image, "label": label}

    return Pipeline(
        source,
        data,
        context,
        parse,
        _build_finish(data, finish),
        example=lambda example, _: _select_parts(prepare(_read(example))),
    ).iterate_once()


def build_prediction(
    data: "StreamedImages", address: str, context: DataContext
) -> UnlabelledRecords:
    """Returns images to predict, prepared like those of the evaluation split."""
    kind, where = addresses.parse_address(address, "StreamedImages", data.address_kinds)
    prepare = image_ops.build_evaluation_crop(data.augment, data.image_size, data.channels)

    def build_pipeline(source: RecordSource, parse: Parse) -> Pipeline:
        def prepare_example(found: Batch, seed: Tensor) -> Tensor:
            image = tf.io.read_file(found["path"]) if "path" in found else found["image"]
            return prepare({"image": image})["image"]

        def finish(images: Tensor, seeds: Tensor) -> Tensor:
            return _scale_pixels(data, mix.to_depth(images) if data.space_to_depth else images)

        treatment = unlabelled.build_record_options(context)
        return Pipeline(source, treatment, context, parse, finish, prepare_example)

    if kind == "images":
        return unlabelled.from_image_files(where, build_pipeline)
    if kind == "tfrecord":
        found, source = unlabelled.open_shards(where)
        made = build_pipeline(source, image_records.build_image_parser(found, data.image_feature))
        records = unlabelled.from_shards(source, made, found.features)
        return dataclasses.replace(records, classes=_name_class_ids(data, found))
    split = data.eval_split if kind == addresses.EVALUATION else data.train_split
    if data.format in ("folder", "index"):
        # Class ids are those of the training split, which is listed only if they are kept.
        listed = (list_split if "label" in context.keep else _list_images)(data, split)
        sizes = [(image.path, image.bytes) for image in listed.images]
        return unlabelled.from_files(sizes, build_pipeline, [one.label for one in listed.images])
    if data.format == "tfds":
        source, parse = _open_tfds(data, split)
        return unlabelled.from_shards(source, build_pipeline(source, parse))
    found = counted.read_manifest(data.data_dir or "", split)
    source, parse = _open_shards(data, found, split)
    return unlabelled.from_shards(source, build_pipeline(source, parse), found.features)


def batch_spec(data: "StreamedImages", examples: int) -> Spec:
    """Returns the spec of a batch: (images, labels)."""
    size, channels = data.image_size, data.channels
    shape = (size // 2, size // 2, 4 * channels) if data.space_to_depth else (size, size, channels)
    images = tf.TensorSpec((examples, *shape), tf.as_dtype(data.image_dtype))
    if has_soft_labels(data):
        return images, tf.TensorSpec((examples, data.num_classes), tf.float32)
    return images, tf.TensorSpec((examples,), tf.int32)


def export_inputs(data: "StreamedImages") -> ExportInputs:
    """Returns the inputs of an exported model: cropped, resized uint8 pixels, or image files."""
    shape = (data.image_size, data.image_size, data.channels)

    def prepare(images: Tensor) -> Tensor:
        return _scale_pixels(data, mix.to_depth(images) if data.space_to_depth else images)

    crop = image_ops.build_evaluation_crop(
        data.augment, data.image_size, data.channels, decode.refuse_rest
    )
    return ExportInputs(
        {"images": shape},
        {"images": "uint8"},
        prepare,
        decode=lambda file: crop({"image": file})["image"],
    )


def read_class_names(data: "StreamedImages") -> list[str] | None:
    """Returns the names of the classes by class id, or None if the data has none."""
    if data.classes:
        return list(data.classes)
    if data.format in ("folder", "index"):
        return _list_images(data, data.train_split).class_names
    if data.format == "tfrecord":
        folder = data.data_dir or ""
        named = files.exists(files.join(folder, manifest.NAME))
        return manifest.read(folder).about.get("classes") if named else None
    from tftpu.input_pipelines.datasets import tfds  # importing TFDS is slow

    builder = tfds.open_builder(data.name, data.data_dir, data.download)
    _, label = tfds.find_image_and_label(builder, data.image_feature, data.label_feature)
    return builder.info.features[label].names


def _name_class_ids(data: "StreamedImages", found: Manifest) -> dict[int, str]:
    """Returns the class names of other shards by their class ids; {} if they have no names."""
    names, label = found.about.get("classes") or (), found.features.get(data.label_feature)
    stated = label.num_classes if label else 0
    return dict(enumerate(names, max(0, stated - len(names)) if stated else data.first_class))


def has_soft_labels(data: "StreamedImages") -> bool:
    """Returns whether labels are class weights, (batch, num_classes), rather than class ids."""
    return bool(data.augment.mixup or data.augment.cutmix)


def _open_source(data: "StreamedImages", split: str) -> tuple[RecordSource, Parse]:
    """Returns the records of a split, and the function that turns them into {"image", "label"}.

    Raises:
        UserError: there is no such split, or its number of classes differs from the config's.
    """
    if data.format in ("folder", "index"):
        return _open_files(data, split)
    if data.format == "tfds":
        return _open_tfds(data, split)
    return _open_shards(data, counted.read_manifest(data.data_dir or "", split), split)


def _open_tfds(data: "StreamedImages", split: str) -> tuple[Shards, Parse]:
    from tftpu.input_pipelines.datasets import tfds  # importing TFDS is slow

    builder = tfds.open_builder(data.name, data.data_dir, data.download)
    source = tfds.open_shards(builder, split, data.shuffle)
    image, label = tfds.find_image_and_label(builder, data.image_feature, data.label_feature)
    classes = builder.info.features[label].num_classes
    _check_classes(data, classes)
    features = {image: Feature("string", (), "image"), label: Feature("int32", (), "list", classes)}
    parse = example_proto.build_parser(features)

    def parse_examples(serialized: Tensor) -> Batch:
        example = parse(serialized, tf.fill(tf.shape(serialized), ""))
        return {"image": example[image], "label": example[label]}

    return source, parse_examples


def _open_shards(data: "StreamedImages", found: Manifest, split: str) -> tuple[Shards, Parse]:
    source = shards.from_manifest(found, split, cache.from_data(data), data.shuffle)
    records = ImageRecords(
        data.image_feature, data.label_feature, data.num_classes, data.first_class, data.classes
    )
    parse = records.build_parser(found)
    stated = found.features[data.label_feature].num_classes
    _check_classes(data, stated and stated - data.first_class)
    return source, parse


def _open_files(data: "StreamedImages", split: str) -> tuple[RecordSource, Parse]:
    found = list_split(data, split)
    for line in image_files.describe_left_out(found.left_out):
        _log.warning("%s: %s", found.folder, line)
    paths = tf.constant([os.fsencode(image.path) for image in found.images])
    labels = tf.constant([image.label for image in found.images], tf.int32)

    def parse(numbers: Tensor) -> Batch:
        return {"path": tf.gather(paths, numbers), "label": tf.gather(labels, numbers)}

    inside = [decode_path(image.path.removeprefix(f"{found.folder}/")) for image in found.images]
    state = [(name, image.label, image.bytes) for name, image in zip(inside, found.images)]
    return IndexedRecords(paths, state), parse


def list_split(data: "StreamedImages", split: str) -> ImageFiles:
    """Lists a split's images in a folder or an index, with the class ids of the training split.

    Raises:
        UserError: there is no such split, or its classes are not those of the config.
    """
    found = _list_images(data, data.train_split, data.classes)
    _check_classes(data, found.num_classes, are_names=found.class_names is not None)
    if split != data.train_split:  # it may lack classes of the training split, but adds none
        found = _list_images(data, split, found.class_names or (), data.num_classes)
    return found


def _list_images(
    data: "StreamedImages", split: str, classes: Sequence[str] = (), num_classes: int = 0
) -> ImageFiles:
    """Lists the image files of a split; see `image_index.list_in_index` for the classes.

    Raises:
        UserError: the folder or the index of the split is missing or not valid.
    """
    folder = data.data_dir or ""
    if data.format == "index":
        return image_index.list_in_index(
            image_index.find_index(folder, split), classes, num_classes
        )
    image_files.check_folder(folder or ".", f" {manifest.OTHER_FOLDER}")
    if _has_folder(folder, split):
        return image_files.list_in_folders(files.join(folder, split), classes)
    if not _holds_out(data):
        raise UserError(_explain_missing_split(data, split))
    found = image_files.list_in_folders(folder.rstrip("/"), classes)
    if split == data.eval_split:
        found = dataclasses.replace(found, left_out={})  # the training split reports these files
    chosen = image_files.select_share(found, 1 / _HELD_OUT, held_out=split == data.eval_split)
    if not chosen.images:
        raise UserError(
            f"The classes in {folder} have too few images to hold out one in {_HELD_OUT} of each: "
            f"add images, or make folders {data.train_split} and {data.eval_split} in it, each "
            "with a folder for each class."
        )
    return chosen


def _holds_out(data: "StreamedImages") -> bool:
    """Returns whether the folders in `data_dir` are classes, so that images must be held out."""
    folder, names = (data.data_dir or "").rstrip("/"), (data.train_split, data.eval_split)
    above, name = os.path.split(folder)
    if any(_has_folder(folder, split) for split in names) or names[0] == names[1]:
        return False
    if name in names and any(_has_folder(above, split) for split in names if split != name):
        return False  # `data_dir` should be the folder above
    _, inside = files.list_folder(folder)
    return sum(map(image_files.is_like_split, inside)) < 2


def _has_folder(folder: str, name: str) -> bool:
    place = files.join(folder, name)
    return any(files.list_folder(place)) if files.is_remote(place) else os.path.isdir(place)


def _explain_missing_split(data: "StreamedImages", split: str) -> str:
    """Returns the error message for a `data_dir` without the folder of a split."""
    folder = (data.data_dir or "").rstrip("/")
    above, name = os.path.split(folder)
    fields = {"train_split": data.train_split, "eval_split": data.eval_split}
    inside = ", ".join(f"{one}/CLASS" for one in dict.fromkeys(fields.values()))
    said = f"There is no folder {files.join(folder, split)}: data.data_dir needs {inside}."
    if name in fields.values() and _has_folder(above, split):
        return f"{said} Did you mean --config.data.data_dir={above or '.'}?"
    _, others = files.list_folder(folder)
    missing = [field for field, one in fields.items() if not _has_folder(folder, one)]
    flags = " ".join(f"--config.data.{field}=NAME" for field in missing)
    return f"{said} It has {', '.join(others[:10])}: name the folder of a split, {flags}."


def _check_classes(data: "StreamedImages", found: int, are_names: bool = True) -> None:
    """Raises `UserError`, or warns, if the number of classes differs from `data.num_classes`.

    Args:
        data: the config.
        found: the number of classes in the data; 0: unknown.
        are_names: whether the classes have names. If they are class ids in an index, images of the
            highest ones may be missing, and there is only a warning.
    """
    if not found or found == data.num_classes:
        return
    if not are_names and found < data.num_classes:
        _log.warning(
            "The highest class id in the split %r is %d, but data.num_classes is %d: set "
            "data.num_classes=%d, unless the split just lacks images of the other classes.",
            data.train_split,
            found - 1,
            data.num_classes,
            found,
        )
        return
    raise UserError(
        f"The data has {found} classes, but data.num_classes is {data.num_classes}: set "
        f"data.num_classes={found}."
    )


def _read(example: Batch) -> Batch:
    """Returns an example with the bytes of its image, read from its path if it has one."""
    if "path" not in example:
        return example
    return {"image": tf.io.read_file(example["path"]), "label": example["label"]}


def _select_parts(example: Batch) -> Batch:
    return {"image": example["image"], "label": example["label"]}


def _build_finish(data: "StreamedImages", mixed: Callable[[Batch, Tensor], Batch]) -> Finish:
    def finish(batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor]:
        batch = mixed(batch, seeds)
        return _scale_pixels(data, batch["image"]), batch["label"]

    return finish


def _scale_pixels(data: "StreamedImages", images: Tensor) -> Tensor:
    if data.image_dtype == "uint8":
        return images
    # Pixels get a mean of about 0 and a variance of about 1.
    images = tf.cast(images, tf.float32) / 64.0 - 1.2
    return tf.cast(images, data.image_dtype)
