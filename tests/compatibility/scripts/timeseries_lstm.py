"""Weather forecast: stacked LSTMs predict the next value of a series."""

import keras
from keras import layers

from tests.compatibility.data import normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((12, 3)),
            layers.LSTM(8, return_sequences=True),
            layers.LSTM(8, recurrent_dropout=0.0),
            layers.Dense(1),
        ]
    )
    net.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    return net


SCRIPT = Script(model, (normal(12, 3), normal(1, seed=1)))
