"""Images with a class each, from a TFDS data set."""

from typing import Any

import tensorflow as tf

from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.reading.epochs import Training
from tftpu.input_pipelines.sources import Images


def training(data: Images, seed: int) -> Training:
    """Shuffled, augmented training images; see `epochs.Training` for the order."""
    builder = tfds.prepared(data.name, data.data_dir)

    def prepare(examples, seeds):
        images = examples["image"]
        images = _shift(images, data.shift, seeds) if data.shift else images
        return _standardise(images, data), tf.cast(examples["label"], tf.int32)

    tfds.count(builder, data.train_split)
    examples = builder.as_dataset(split=data.train_split, shuffle_files=False)
    return Training(
        examples=tfds.in_memory(examples),
        global_batch_size=data.global_batch_size,
        seed=seed,
        prepare=prepare,
    )


def evaluation(data: Images) -> tf.data.Dataset:
    """Every evaluation image once, in order."""
    builder = tfds.prepared(data.name, data.data_dir)
    tfds.count(builder, data.eval_split)

    def prepare(examples):
        return _standardise(examples["image"], data), tf.cast(examples["label"], tf.int32)

    examples = builder.as_dataset(split=data.eval_split, shuffle_files=False)
    return examples.batch(data.global_batch_size).map(prepare, tf.data.AUTOTUNE)


def batch_spec(data: Images, examples: int) -> Any:
    """(images, labels) of a batch."""
    shape = (examples, data.image_size, data.image_size, data.channels)
    return tf.TensorSpec(shape, tf.float32), tf.TensorSpec((examples,), tf.int32)


def class_names(data: Images) -> list[str]:
    """The names of the classes by their numbers."""
    return tfds.prepared(data.name, data.data_dir).info.features["label"].names


def _standardise(images: tf.Tensor, data: Images) -> tf.Tensor:
    """uint8 pixels to float32 of about zero mean and unit variance, static shape."""
    shape = (images.shape[0], data.image_size, data.image_size, data.channels)
    return tf.cast(tf.ensure_shape(images, shape), tf.float32) / 64.0 - 1.2


def _shift(images: tf.Tensor, pixels: int, seeds: tf.Tensor) -> tf.Tensor:
    """Each image moved by up to `pixels` in each direction, zeros where nothing was.

    Args:
        images: (batch, height, width, channels).
        seeds: (batch, 2), random int32.
    """
    height, width = images.shape[1:3]
    padded = tf.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    top, left = tf.unstack(tf.math.floormod(seeds, 2 * pixels + 1), axis=1)
    rows = top[:, None] + tf.range(height)  # (batch, height)
    columns = left[:, None] + tf.range(width)
    padded = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(padded, columns, axis=2, batch_dims=1)
