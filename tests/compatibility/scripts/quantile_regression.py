"""Quantiles of a target, by the pinball loss."""

import keras
from keras import layers, ops

from tests.compatibility.data import normal
from tests.compatibility.running import Script

QUANTILES = (0.1, 0.5, 0.9)


def pinball(y_true, y_pred):
    error = y_true - y_pred  # (batch, quantiles)
    shares = ops.convert_to_tensor(QUANTILES)
    return ops.mean(ops.maximum(shares * error, (shares - 1.0) * error), axis=-1)


def model() -> keras.Model:
    net = keras.Sequential([keras.Input((5,)), layers.Dense(16, "relu"), layers.Dense(3)])
    net.compile(keras.optimizers.Adamax(1e-3), pinball, metrics=["mae"])
    return net


SCRIPT = Script(model, (normal(5), normal(1, seed=1)))
