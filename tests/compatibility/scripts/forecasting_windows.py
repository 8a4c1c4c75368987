"""Forecast from sliding windows, cut by `timeseries_dataset_from_array`."""

import keras
import numpy as np
from keras import layers

from tests.compatibility.data import BATCH, EXAMPLES
from tests.compatibility.running import Script

LENGTH = 9


def model() -> keras.Model:
    net = keras.Sequential(
        [keras.Input((LENGTH, 2)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(1)]
    )
    net.compile("adam", "huber", metrics=["mae"])
    return net


SERIES = np.random.default_rng(0).normal(size=(EXAMPLES + LENGTH, 2)).astype("float32")
WINDOWS = keras.utils.timeseries_dataset_from_array(
    SERIES[:-1], SERIES[LENGTH:, :1], sequence_length=LENGTH, batch_size=BATCH
)
SCRIPT = Script(model, WINDOWS)
