"""Transformer encoder that classifies texts."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers
from tests.compatibility.running import Script

WIDTH = 16


class Encoder(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2)
        self.feed_forward = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.feed_forward(x))


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x):
        return x + ops.convert_to_tensor(self.table)


def model() -> keras.Model:
    words = keras.Input((10,), dtype="int32")
    x = Encoder()(Positions()(layers.Embedding(30, WIDTH)(words)))
    x = layers.Dropout(0.0)(layers.GlobalAveragePooling1D()(x))
    net = keras.Model(words, layers.Dense(2, activation="softmax")(x))
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (integers(0, 30, 10), integers(0, 2)), sparse=True)
