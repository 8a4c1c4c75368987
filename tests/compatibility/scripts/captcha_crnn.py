"""Reading captchas: convolutional features, then an LSTM across the image, with CTC."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    images = keras.Input((8, 20, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(images)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Reshape((10, 16))(layers.Permute((2, 1, 3))(x))
    x = layers.Dense(8, activation="relu")(x)
    x = layers.LSTM(8, return_sequences=True)(x)
    net = keras.Model(images, layers.Dense(6)(x))
    net.compile(keras.optimizers.Adam(1e-3), keras.losses.CTC())
    return net


SCRIPT = Script(model, (uniform(8, 20, 1), integers(1, 6, 3)))
