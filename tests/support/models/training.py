"""Trainers and small compiled models that several tests use."""

import keras
import numpy as np
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, random_batches

STEPS = 12


def examples(count: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels of four classes, always the same."""
    ((x, _, _),) = random_batches(1, count, False)
    return x, (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] > 0)


def data(batch: int = 16, count: int = 96) -> tf.data.Dataset:
    """Returns `examples` in batches."""
    return tf.data.Dataset.from_tensor_slices(examples(count)).batch(batch)


def compiled(model: keras.Model | None = None, **options) -> keras.Model:
    """Returns a compiled model; `options` are those of `compile`."""
    model = model or mlp()
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options.setdefault("metrics", ["accuracy"])
    model.compile(options.pop("optimizer", "sgd"), **options)
    return model


def make_trainer(
    model: keras.Model, workdir=None, *, writers=(), sample=None, hyperparameters=None, **options
) -> tftpu.Trainer:
    """Returns a trainer; `options` are the fields of `TrainConfig`, `writers` names or objects."""
    names = tuple(writer for writer in writers if isinstance(writer, str))
    return tftpu.Trainer(
        model,
        workdir,
        tftpu.TrainConfig(writers=names, **options),
        writers=[writer for writer in writers if not isinstance(writer, str)],
        sample=sample,
        hyperparameters=hyperparameters,
    )


def slowly(x, y, seconds=0.02):
    """Returns its arguments after a time, the same on any machine."""
    end = tf.timestamp() + seconds
    with tf.control_dependencies([tf.while_loop(lambda _: tf.timestamp() < end, lambda i: i, [0])]):
        return tf.identity(x), tf.identity(y)
