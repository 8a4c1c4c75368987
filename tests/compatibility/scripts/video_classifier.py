"""Video classifier: a convolution for each frame, a GRU over them, frames masked by hand."""

import keras
import numpy as np
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script

FRAMES = 5


def model() -> keras.Model:
    frames = keras.Input((FRAMES, 6, 6, 1))
    there = keras.Input((FRAMES,), dtype="bool")
    cnn = layers.Conv2D(4, 3, strides=2, activation="relu")
    x = layers.Reshape((FRAMES, 16))(layers.TimeDistributed(cnn)(frames))
    x = layers.GRU(8)(x, mask=there)
    net = keras.Model([frames, there], layers.Dense(3, activation="softmax")(x))
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


LENGTHS = integers(1, FRAMES + 1, 1)
X = uniform(FRAMES, 6, 6, 1), np.arange(FRAMES) < LENGTHS
SCRIPT = Script(model, (X, integers(0, 3)))
