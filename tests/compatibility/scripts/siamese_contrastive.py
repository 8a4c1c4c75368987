"""Siamese network: the distance of two images, with a contrastive loss."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def contrastive(y_true, y_pred):
    near = (1.0 - y_true) * ops.square(y_pred)
    far = y_true * ops.square(ops.maximum(1.0 - y_pred, 0.0))
    return ops.mean(near + far, axis=-1)


def model() -> keras.Model:
    tower = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(6, activation="tanh"),
        ]
    )
    one, other = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    distance = layers.Lambda(
        lambda pair: ops.sqrt(ops.sum(ops.square(pair[0] - pair[1]), axis=-1, keepdims=True) + 1e-7)
    )([tower(one), tower(other)])
    net = keras.Model([one, other], layers.Dense(1, activation="sigmoid")(distance))
    net.compile("rmsprop", contrastive, metrics=["accuracy"])
    return net


PAIRS = uniform(8, 8, 1), uniform(8, 8, 1, seed=1)
SCRIPT = Script(model, (PAIRS, integers(0, 2, 1).astype("float32")))
