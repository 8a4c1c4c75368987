"""Forecast of several horizons by dilated causal convolutions, with quantile outputs."""

import keras
from keras import layers

from tests.compatibility.data import normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    series = keras.Input((16, 2))
    x = series
    for rate in (1, 2, 4):
        filtered = layers.Conv1D(4, 2, padding="causal", dilation_rate=rate, activation="tanh")(x)
        gate = layers.Conv1D(4, 2, padding="causal", dilation_rate=rate, activation="sigmoid")(x)
        x = layers.Concatenate()([x, layers.Multiply()([filtered, gate])])
    net = keras.Model(series, layers.Dense(3)(x[:, -1]))
    net.compile(keras.optimizers.Adam(1e-3), "mean_absolute_error")
    return net


SCRIPT = Script(model, (normal(16, 2), normal(3, seed=1)))
