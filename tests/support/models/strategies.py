"""Strategies and small models that several tests use."""

import keras
import numpy as np
import tensorflow as tf


def mlp(inputs: int = 6, classes: int = 4, **layer) -> keras.Model:
    """Returns two dense layers with fixed weights and nonzero biases."""
    keras.utils.set_random_seed(3)
    bias = keras.initializers.RandomNormal(stddev=0.1, seed=5)
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(16, activation="tanh", bias_initializer=bias, **layer),
            keras.layers.Dense(classes, bias_initializer=bias, dtype="float32"),
        ]
    )


def random_batches(count: int, batch: int, weighted: bool, inputs: int = 6, classes: int = 4):
    """Returns `count` fixed NumPy batches of (x, y, weight or None)."""
    rng = np.random.default_rng(11)
    batches = []
    for _ in range(count):
        x = rng.normal(size=(batch, inputs)).astype(np.float32)
        y = rng.integers(0, classes, batch)
        w = rng.uniform(0.1, 3.0, batch).astype(np.float32) if weighted else None
        batches.append((x, y, w))
    return batches


def dataset(batches) -> tf.data.Dataset:
    """Returns the batches in order as a data set of static shape."""
    arrays = [np.stack(part) for part in zip(*batches) if part[0] is not None]
    return tf.data.Dataset.from_tensor_slices(tuple(arrays))


def relative(actual, expected) -> float:
    """Returns the norm of the difference over the norm of the expected value."""
    actual, expected = (np.asarray(v, np.float64) for v in (actual, expected))
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-12))


class Negative(keras.losses.Loss):
    """Minus the sum of the outputs, whose gradient is -1."""

    def call(self, y_true, y_pred):
        return -keras.ops.sum(y_pred, axis=-1)
