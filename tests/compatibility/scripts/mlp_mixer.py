"""MLP-mixer: dense layers over patches and over channels."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script

PATCHES, WIDTH = 9, 16


def mlp(x, width):
    return layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(x))


def model() -> keras.Model:
    images = keras.Input((12, 12, 3))
    x = layers.Conv2D(WIDTH, 4, strides=4)(images)
    x = layers.Reshape((PATCHES, WIDTH))(x)
    mixed = layers.Permute((2, 1))(layers.LayerNormalization()(x))
    x = x + layers.Permute((2, 1))(mlp(mixed, PATCHES))
    x = x + mlp(layers.LayerNormalization()(x), WIDTH)
    outputs = layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    net = keras.Model(images, outputs)
    net.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return net


LABELS = keras.utils.to_categorical(integers(0, 5), 5)
SCRIPT = Script(model, (uniform(12, 12, 3), LABELS))
