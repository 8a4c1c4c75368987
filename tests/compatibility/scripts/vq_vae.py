"""Vector-quantised autoencoder: a codebook, with gradients straight through the choice."""

import keras
from keras import layers, ops

from tests.compatibility.data import uniform
from tests.compatibility.running import Script

CODES, WIDTH = 8, 4


class VqVae(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = layers.Conv2D(WIDTH, 3, strides=2, padding="same")
        self.decoder = layers.Conv2DTranspose(1, 3, strides=2, padding="same")
        self.codes = self.add_weight(shape=(CODES, WIDTH), initializer="uniform", name="codes")

    def call(self, images):
        encoded = self.encoder(images)
        distances = ops.sum(ops.square(encoded[..., None, :] - self.codes), axis=-1)
        chosen = ops.one_hot(ops.argmin(distances, axis=-1), CODES)
        quantized = chosen @ ops.convert_to_tensor(self.codes)
        straight = encoded + ops.stop_gradient(quantized - encoded)
        return self.decoder(straight), encoded, quantized


def loss(model, batch, training):
    decoded, encoded, quantized = model(batch, training=training)

    def error(one, other):
        return ops.mean(ops.square(one - other), axis=(1, 2, 3))

    reconstruction = error(batch, decoded)
    commitment = error(ops.stop_gradient(quantized), encoded)
    codebook = error(quantized, ops.stop_gradient(encoded))
    return reconstruction + 0.25 * commitment + codebook, {"reconstruction": reconstruction}


def model() -> keras.Model:
    net = VqVae()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, uniform(8, 8, 1), loss_fn=loss)
