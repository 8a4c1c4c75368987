"""Images with a class each, from a TFDS data set."""

from typing import Any

import tensorflow as tf

from tftpu.input_pipelines import tfds_source
from tftpu.input_pipelines.epochs import Training
from tftpu.input_pipelines.sources import Images


def training(data: Images, seed: int) -> Training:
    """Shuffled, augmented training images; see `epochs.Training` for the order."""
    builder = tfds_source.prepared(data.name, data.data_dir)

    def prepare(example, seed):
        image = _shift(example["image"], data.shift, seed) if data.shift else example["image"]
        return _standardise(image, data), tf.cast(example["label"], tf.int32)

    return Training(
        base=builder.as_dataset(split=data.train_split, shuffle_files=False).cache(),
        count=tfds_source.count(builder, data.train_split),
        global_batch=data.global_batch,
        seed=seed,
        prepare=prepare,
    )


def evaluation(data: Images) -> tf.data.Dataset:
    """Every evaluation image once, in order."""
    builder = tfds_source.prepared(data.name, data.data_dir)
    tfds_source.count(builder, data.eval_split)

    def prepare(example):
        return _standardise(example["image"], data), tf.cast(example["label"], tf.int32)

    examples = builder.as_dataset(split=data.eval_split, shuffle_files=False)
    return examples.map(prepare, tf.data.AUTOTUNE).batch(data.global_batch)


def batch_spec(data: Images, examples: int) -> Any:
    """(images, labels) of a batch."""
    shape = (examples, data.image_size, data.image_size, data.channels)
    return tf.TensorSpec(shape, tf.float32), tf.TensorSpec((examples,), tf.int32)


def _standardise(image: tf.Tensor, data: Images) -> tf.Tensor:
    """uint8 pixels to float32 of about zero mean and unit variance, static shape."""
    image = tf.ensure_shape(image, (data.image_size, data.image_size, data.channels))
    return tf.cast(image, tf.float32) / 64.0 - 1.2


def _shift(image: tf.Tensor, pixels: int, seed: tf.Tensor) -> tf.Tensor:
    """The image moved by up to `pixels` in each direction, zeros where nothing was."""
    padded = tf.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)))
    return tf.image.stateless_random_crop(padded, tf.shape(image), seed)
