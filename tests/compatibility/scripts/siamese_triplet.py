"""Siamese network with a triplet loss: the model's own `compute_loss`, for each example."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


class Triplets(keras.Model):
    def __init__(self):
        super().__init__()
        self.tower = keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(6, use_bias=False),
            ]
        )

    def call(self, triplet):
        anchor, positive, negative = (self.tower(x) for x in triplet)
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        return near, far

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        near, far = y_pred
        return ops.maximum(near - far + 0.5, 0.0)  # (batch,)


def model() -> keras.Model:
    net = Triplets()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


TRIPLETS = tuple(uniform(8, 8, 1, seed=seed) for seed in range(3))
SCRIPT = Script(model, (TRIPLETS, integers(0, 1)))
