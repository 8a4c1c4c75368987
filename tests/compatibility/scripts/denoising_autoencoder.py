"""Convolutional autoencoder that removes noise from images."""

import keras
import numpy as np
from keras import layers

from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    net.compile("adam", "binary_crossentropy")
    return net


CLEAN = uniform(8, 8, 1)
SCRIPT = Script(model, (np.clip(CLEAN + 0.3 * normal(8, 8, 1), 0, 1), CLEAN))
