"""Gated residual networks choose among the variables of a table."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script

WIDTH = 8


class Gated(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.hidden, self.out = layers.Dense(units, activation="elu"), layers.Dense(units)
        self.gate, self.skip = layers.Dense(units, activation="sigmoid"), layers.Dense(units)
        self.norm = layers.LayerNormalization()

    def call(self, x):
        out = self.out(self.hidden(x))
        return self.norm(self.skip(x) + self.gate(out) * out)


def model() -> keras.Model:
    inputs = [keras.Input((1,)) for _ in range(3)]
    features = [layers.Dense(WIDTH)(x) for x in inputs]
    chosen = layers.Softmax()(Gated(3)(layers.Concatenate()(features)))
    stacked = [layers.Reshape((1, WIDTH))(Gated(WIDTH)(x)) for x in features]
    x = layers.Dot(axes=1)([chosen, layers.Concatenate(axis=1)(stacked)])
    net = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    net.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return net


X = tuple(normal(1, seed=seed) for seed in range(3))
SCRIPT = Script(model, (X, integers(0, 2, 1)))
