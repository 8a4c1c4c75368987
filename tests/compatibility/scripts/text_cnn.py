"""Text classifier: convolutions over embeddings with several widths."""

import keras
from keras import layers

from tests.compatibility.data import integers
from tests.compatibility.running import Script


def model() -> keras.Model:
    words = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 8)(words)
    found = [layers.Conv1D(6, size, activation="relu")(x) for size in (2, 3)]
    x = layers.Concatenate()([layers.GlobalMaxPooling1D()(part) for part in found])
    net = keras.Model(words, layers.Dense(1, activation="sigmoid")(x))
    net.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (integers(0, 30, 12), integers(0, 2, 1)), sparse=True)
