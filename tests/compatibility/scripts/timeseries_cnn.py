"""Time series classified by one-dimensional convolutions."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    series = keras.Input((32, 1))
    x = series
    for _ in range(2):
        x = layers.Conv1D(8, 3, padding="same")(x)
        x = layers.ReLU()(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x)
    net = keras.Model(series, layers.Dense(2, activation="softmax")(x))
    metrics = ["sparse_categorical_accuracy"]
    net.compile("adam", "sparse_categorical_crossentropy", metrics=metrics)
    return net


SCRIPT = Script(model, (normal(32, 1), integers(0, 2)))
