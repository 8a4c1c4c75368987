"""Images with one class each, in memory."""

from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.config.data import ExportInputs
from tftpu.input_pipelines import addresses, unlabelled
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.datasets import small
from tftpu.input_pipelines.pipeline import Parse, Pipeline, RecordSource
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.tensors import Batch, Spec, Tensor, skip_autograph
from tftpu.input_pipelines.unlabelled import UnlabelledRecords

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Images


def build_training(data: "Images", context: DataContext) -> ArrayPipeline:
    """Returns shuffled, augmented training images; see `reading.order` for the order."""

    def prepare(examples: Batch, seeds: Tensor) -> tuple[Tensor, Tensor]:
        images = examples["image"]
        images = _shift(images, data.shift, seeds) if data.shift else images
        return _standardize(images, data), tf.cast(examples["label"], tf.int32)

    return ArrayPipeline(
        examples=small.load_split(data.name, data.data_dir, data.train_split),
        global_batch_size=context.global_batch_size,
        seed=context.seed,
        prepare=prepare,
        from_files=True,
    )


def build_evaluation(data: "Images", context: DataContext) -> tf.data.Dataset:
    """Returns a data set of every evaluation image, once, in order, in batches."""
    examples = small.load_split(data.name, data.data_dir, data.eval_split)

    def prepare(examples: Batch) -> tuple[Tensor, Tensor]:
        return _standardize(examples["image"], data), tf.cast(examples["label"], tf.int32)

    dataset = tf.data.Dataset.from_tensor_slices(examples)
    return dataset.batch(context.global_batch_size).map(prepare, tf.data.AUTOTUNE)


def build_prediction(data: "Images", address: str, context: DataContext) -> UnlabelledRecords:
    """Returns the images of a split or of a folder, whose files are cropped square and resized."""
    kind, where = addresses.parse_address(address, "Images", data.address_kinds)
    if kind != "images":
        split = data.eval_split if kind == addresses.EVALUATION else data.train_split
        examples = small.load_split(data.name, data.data_dir, split)
        images, labels = examples["image"], examples["label"]
        return unlabelled.from_arrays(
            images, context, split, {"label": labels}, lambda images: _standardize(images, data)
        )

    def build_pipeline(source: RecordSource, parse: Parse) -> Pipeline:
        def prepare_example(found: Batch, seed: Tensor) -> Tensor:
            return _decode_file(tf.io.read_file(found["path"]), data)

        def finish(images: Tensor, seeds: Tensor) -> Tensor:
            return _standardize(images, data)

        treatment = unlabelled.build_record_options(context)
        return Pipeline(source, treatment, context, parse, finish, prepare_example)

    return unlabelled.from_image_files(where, build_pipeline)


def batch_spec(data: "Images", examples: int) -> Spec:
    """Returns the spec of a batch: (images, labels)."""
    shape = (examples, data.image_size, data.image_size, data.channels)
    return tf.TensorSpec(shape, tf.float32), tf.TensorSpec((examples,), tf.int32)


def export_inputs(data: "Images") -> ExportInputs:
    """Returns the inputs of an exported model: uint8 pixels, or image files to decode."""
    shape = (data.image_size, data.image_size, data.channels)

    def decode_file(file: Tensor) -> Tensor:
        return _decode_file(file, data, decode.refuse_rest)

    return ExportInputs(
        {"images": shape},
        {"images": "uint8"},
        lambda images: _standardize(images, data),
        decode=decode_file if data.channels in (1, 3) else None,
    )


def read_class_names(data: "Images") -> list[str]:
    """Returns the names of the classes by class id."""
    from tftpu.input_pipelines.datasets import tfds  # importing TFDS is slow

    return tfds.open_builder(data.name, data.data_dir).info.features["label"].names


def _decode_file(file: Tensor, data: "Images", rest: decode.Decode | None = None) -> Tensor:
    """Returns the central square of an image file, scaled to `data.image_size`, as uint8 pixels."""
    window = decode.find_central_square
    return decode.crop_and_resize(file, window, data.image_size, data.channels, rest)


@skip_autograph
def _standardize(images: Tensor, data: "Images") -> Tensor:
    """Converts uint8 pixels to float32 with a static shape, about zero mean, unit variance."""
    shape = (images.shape[0], data.image_size, data.image_size, data.channels)
    return tf.cast(tf.ensure_shape(images, shape), tf.float32) / 64.0 - 1.2


@skip_autograph
def _shift(images: Tensor, pixels: int, seeds: Tensor) -> Tensor:
    """Shifts each image by up to `pixels` in each direction, filling with zeros.

    Args:
        images: (batch, height, width, channels).
        pixels: largest shift, in pixels.
        seeds: (batch, 2), random int32.
    """
    height, width = images.shape[1:3]
    padded = tf.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    top, left = tf.unstack(tf.math.floormod(seeds, 2 * pixels + 1), axis=1)
    rows = top[:, None] + tf.range(height)  # (batch, height)
    columns = left[:, None] + tf.range(width)
    padded = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(padded, columns, axis=2, batch_dims=1)
