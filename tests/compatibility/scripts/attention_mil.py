"""Multiple-instance learning: a bag is classified by attention over its instances."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script

BAG = 3


class Attention(layers.Layer):
    """Gated attention; returns one weight for each instance."""

    def __init__(self):
        super().__init__()
        self.value, self.gate = layers.Dense(8, "tanh"), layers.Dense(8, "sigmoid")
        self.score = layers.Dense(1, use_bias=False)

    def call(self, bag):
        return ops.softmax(self.score(self.value(bag) * self.gate(bag)), axis=1)


def model() -> keras.Model:
    bag = keras.Input((BAG, 6))
    x = layers.Dense(8, activation="relu", kernel_regularizer="l2")(bag)
    x = layers.Flatten()(layers.Multiply()([Attention()(x), x]))
    net = keras.Model(bag, layers.Dense(2, activation="softmax")(x))
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (normal(BAG, 6), integers(0, 2)))
