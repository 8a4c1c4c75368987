"""Transformer over a table: a token for each column."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script

NUMBERS, WIDTH = 3, 8


class Tokens(layers.Layer):
    """A token for every number: the number times a trained vector, plus another."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(NUMBERS, WIDTH), initializer="normal")
        self.shift = self.add_weight(shape=(NUMBERS, WIDTH), initializer="normal")

    def call(self, numbers):
        return numbers[..., None] * self.scale + self.shift


def model() -> keras.Model:
    numbers = keras.Input((NUMBERS,), name="numbers")
    categories = keras.Input((2,), dtype="int32", name="categories")
    offsets = ops.convert_to_tensor([0, 5])
    words = layers.Embedding(10, WIDTH)(categories + offsets)
    x = layers.Concatenate(axis=1)([Tokens()(numbers), words])
    x = x + layers.MultiHeadAttention(2, 4)(layers.LayerNormalization()(x), x)
    x = x + layers.Dense(WIDTH)(layers.Dense(16, "relu")(layers.LayerNormalization()(x)))
    x = layers.LayerNormalization()(layers.GlobalAveragePooling1D()(x))
    net = keras.Model({"numbers": numbers, "categories": categories}, layers.Dense(1)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    net.compile(keras.optimizers.AdamW(1e-3), loss)
    return net


X = {"numbers": normal(NUMBERS), "categories": integers(0, 5, 2)}
SCRIPT = Script(model, (X, integers(0, 2, 1)), sparse=True)
