"""Diffusion: a network with a time embedding predicts the noise of an image."""

import math

import keras
from keras import layers, ops

from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


def denoiser():
    images, time = keras.Input((8, 8, 1)), keras.Input((1,))
    frequencies = ops.exp(ops.linspace(0.0, math.log(100.0), 4))
    waves = layers.Concatenate()([ops.sin(time * frequencies), ops.cos(time * frequencies)])
    x = layers.Conv2D(8, 3, padding="same")(images)
    x = x + layers.Reshape((1, 1, 8))(layers.Dense(8)(waves))
    x = layers.GroupNormalization(4)(layers.Conv2D(8, 3, padding="same", activation="silu")(x))
    return keras.Model([images, time], layers.Conv2D(1, 3, padding="same", dtype="float32")(x))


def loss(model, batch, training):
    images, noise, time = batch
    angle = time[:, None, None, :] * math.pi / 2
    noisy = ops.cos(angle) * images + ops.sin(angle) * noise
    predicted = model([noisy, time], training=training)
    return ops.mean(ops.abs(predicted - noise), axis=(1, 2, 3))


def model() -> keras.Model:
    net = denoiser()
    net.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4))
    return net


SCRIPT = Script(
    model, (uniform(8, 8, 1), normal(8, 8, 1), uniform(1, seed=1)), loss_fn=loss, preflight=True
)
