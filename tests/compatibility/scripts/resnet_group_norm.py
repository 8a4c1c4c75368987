"""Residual network with group normalization, momentum and a decaying learning rate."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def residual(x, filters, stride):
    out = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    out = layers.ReLU()(layers.GroupNormalization(4)(out))
    out = layers.Conv2D(filters, 3, padding="same", use_bias=False)(out)
    out = layers.GroupNormalization(4)(out)
    if stride > 1:
        x = layers.Conv2D(filters, 1, stride, use_bias=False)(x)
    return layers.ReLU()(layers.Add()([x, out]))


def model() -> keras.Model:
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(images)
    x = residual(residual(x, 8, 1), 16, 2)
    net = keras.Model(images, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))
    rate = keras.optimizers.schedules.CosineDecay(0.05, 8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(rate, momentum=0.9, nesterov=True), loss)
    return net


SCRIPT = Script(model, (uniform(8, 8, 3), integers(0, 5)))
