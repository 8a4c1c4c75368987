"""Masked autoencoder: patches that the encoder does not see are reconstructed."""

import keras
from keras import layers, ops

from tests.compatibility.data import uniform
from tests.compatibility.running import Script

PATCHES, PIXELS, WIDTH = 9, 16, 8


class MaskedAutoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(WIDTH)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.decode = layers.Dense(PIXELS)
        self.hidden = self.add_weight(shape=(WIDTH,), initializer="normal", name="hidden")

    def call(self, inputs):
        patches, masked = inputs
        x = ops.where(masked[..., None] > 0, self.hidden, self.embed(patches))
        return self.decode(self.norm(x + self.attention(x, x)))


def loss(model, batch, training):
    patches, masked = batch
    decoded = model(batch, training=training)
    error = ops.mean(ops.square(decoded - patches), axis=-1)  # (batch, patches)
    return ops.sum(error * masked, axis=-1) / (ops.sum(masked, axis=-1) + 1e-6)


def model() -> keras.Model:
    net = MaskedAutoencoder()
    net.compile(keras.optimizers.AdamW(1e-3))
    return net


MASKED = (uniform(PATCHES, seed=1) < 0.6).astype("float32")
SCRIPT = Script(model, (uniform(PATCHES, PIXELS), MASKED), loss_fn=loss)
