"""Masked language model: hidden words are predicted; weights choose them."""

import keras
import numpy as np
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script

VOCABULARY, LENGTH, WIDTH, HIDDEN = 20, 10, 8, 1


def model() -> keras.Model:
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH, "gelu")(x))
    net = keras.Model(words, layers.Dense(VOCABULARY, activation="softmax")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    net.compile("adam", loss)
    return net


WORDS = integers(2, VOCABULARY, LENGTH)
CHOSEN = uniform(LENGTH) < 0.3
INPUTS = np.where(CHOSEN, HIDDEN, WORDS).astype("int32")
SCRIPT = Script(model, (INPUTS, WORDS, CHOSEN.astype("float32")), sparse=True)
