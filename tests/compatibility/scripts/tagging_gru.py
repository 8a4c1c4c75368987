"""Named entities: a GRU labels every word; the loss leaves out padding by the mask."""

import keras
from keras import layers

from tests.compatibility.data import integers, padded_tokens
from tests.compatibility.running import Script


def model() -> keras.Model:
    words = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.GRU(8, return_sequences=True)(x)
    net = keras.Model(words, layers.Dense(5, activation="softmax")(x))
    net.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (padded_tokens(20, 8), integers(0, 5, 8)), sparse=True)
