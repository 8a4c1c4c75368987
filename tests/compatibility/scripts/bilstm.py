"""Bidirectional LSTM that classifies texts; padding is masked."""

import keras
from keras import layers

from tests.compatibility.data import integers, padded_tokens
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((10,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    net.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (padded_tokens(20, 10), integers(0, 2)), sparse=True, preflight=True)
