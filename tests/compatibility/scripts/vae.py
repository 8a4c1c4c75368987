"""Variational autoencoder: reconstruction and divergence in one loss function."""

import keras
from keras import layers, ops

from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(4),
            ]
        )
        self.decoder = keras.Sequential(
            [
                layers.Dense(4 * 4 * 8, activation="relu"),
                layers.Reshape((4, 4, 8)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
            ]
        )

    def call(self, inputs):
        images, noise = inputs
        mean, log_var = ops.split(self.encoder(images), 2, axis=-1)
        return self.decoder(mean + ops.exp(0.5 * log_var) * noise), mean, log_var


def loss(model, batch, training):
    images, _ = batch
    decoded, mean, log_var = model(batch, training=training)
    error = ops.sum(keras.losses.binary_crossentropy(images, decoded), axis=(1, 2))
    kl = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1)
    return error + kl, {"reconstruction": error, "kl": kl}


def model() -> keras.Model:
    net = Vae()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, (uniform(8, 8, 1), normal(2)), loss_fn=loss)
