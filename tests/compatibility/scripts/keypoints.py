"""Key points of an image by regression, from depthwise separable convolutions."""

import keras
from keras import layers

from tests.compatibility.data import uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    images = keras.Input((12, 12, 3))
    x = layers.SeparableConv2D(8, 3, strides=2, activation="relu")(images)
    x = layers.SeparableConv2D(8, 3, strides=2, activation="relu")(x)
    x = layers.Conv2D(8, 2, activation="sigmoid")(x)
    net = keras.Model(images, layers.Reshape((4, 2))(x[:, 0, 0]))
    net.compile(keras.optimizers.Adam(1e-3), "mse")
    return net


SCRIPT = Script(model, (uniform(12, 12, 3), uniform(4, 2)))
