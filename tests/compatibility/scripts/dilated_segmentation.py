"""Segmentation in the manner of DeepLab: dilated convolutions at several rates."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def convolved(x, size, rate):
    x = layers.Conv2D(8, size, dilation_rate=rate, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.LayerNormalization()(x))


def model() -> keras.Model:
    images = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(images)
    pooled = layers.GlobalAveragePooling2D(keepdims=True)(x)
    pooled = layers.UpSampling2D(6, interpolation="bilinear")(convolved(pooled, 1, 1))
    x = layers.Concatenate()([pooled, convolved(x, 1, 1), convolved(x, 3, 2), convolved(x, 3, 3)])
    x = layers.UpSampling2D(2, interpolation="bilinear")(convolved(x, 1, 1))
    net = keras.Model(images, layers.Conv2D(4, 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    net.compile(keras.optimizers.Adam(1e-3), loss)
    return net


SCRIPT = Script(model, (uniform(12, 12, 3), integers(0, 4, 12, 12)))
