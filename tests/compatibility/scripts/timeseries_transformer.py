"""Time series classified by attention."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    series = keras.Input((16, 4))
    x = layers.MultiHeadAttention(2, 8)(series, series)
    x = layers.LayerNormalization(epsilon=1e-6)(x) + series
    hidden = layers.Conv1D(4, 1, activation="relu")(x)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(4, 1)(hidden)) + x
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    net = keras.Model(series, layers.Dense(2)(layers.Dense(16, "relu")(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(1e-3), loss)
    return net


SCRIPT = Script(model, (normal(16, 4), integers(0, 2)))
