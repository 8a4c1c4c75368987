"""U-Net: segmentation with a class for each pixel, and skip connections."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def convolved(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.Activation("relu")(layers.GroupNormalization(4)(x))


def model() -> keras.Model:
    images = keras.Input((8, 8, 3))
    first = convolved(images, 8)
    second = convolved(layers.MaxPooling2D()(first), 16)
    x = convolved(layers.MaxPooling2D()(second), 16)
    x = layers.Conv2DTranspose(16, 2, strides=2)(x)
    x = convolved(layers.Concatenate()([x, second]), 16)
    x = layers.UpSampling2D()(x)
    x = convolved(layers.Concatenate()([x, first]), 8)
    net = keras.Model(images, layers.Conv2D(3, 1, activation="softmax")(x))
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (uniform(8, 8, 3), integers(0, 3, 8, 8)), preflight=True)
