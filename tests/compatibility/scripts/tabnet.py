"""Attentive choice of columns, step by step, with an added loss for its entropy."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script

COLUMNS = 8


class Steps(layers.Layer):
    def __init__(self, count=2):
        super().__init__()
        self.transforms = [layers.Dense(8, activation="relu") for _ in range(count)]
        self.attentions = [layers.Dense(COLUMNS) for _ in range(count)]

    def call(self, x):
        prior, hidden, total = ops.ones_like(x), x, 0.0
        for transform, attention in zip(self.transforms, self.attentions):
            mask = ops.softmax(attention(hidden) + ops.log(prior))
            self.add_loss(1e-2 * ops.mean(ops.sum(-mask * ops.log(mask + 1e-8), axis=-1)))
            prior = prior * (1.5 - mask)
            hidden = transform(mask * x)
            total = total + hidden
        return total


def model() -> keras.Model:
    features = keras.Input((COLUMNS,))
    net = keras.Model(features, layers.Dense(3, activation="softmax")(Steps()(features)))
    net.compile("adam", "sparse_categorical_crossentropy")
    return net


SCRIPT = Script(model, (normal(COLUMNS), integers(0, 3)))
