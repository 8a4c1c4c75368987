"""Generative adversarial network: a discriminator and a generator, each with its optimizer."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(8, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4 * 4 * 8),
                layers.Reshape((4, 4, 8)),
                layers.LeakyReLU(0.2),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
            ]
        )

    def call(self, noise):
        return self.generator(noise)


def crossentropy(target, logits):
    return ops.binary_crossentropy(ops.full_like(logits, target), logits, from_logits=True)[:, 0]


def discriminator_loss(model, batch, training):
    images, noise = batch
    real = model.discriminator(images, training=training)
    fake = model.discriminator(model.generator(noise, training=training), training=training)
    return crossentropy(1.0, real) + crossentropy(0.0, fake)


def generator_loss(model, batch, training):
    fake = model.generator(batch[1], training=training)
    return crossentropy(1.0, model.discriminator(fake, training=training))


def objectives(model):
    rate = 1e-3
    return [
        tftpu.Objective(
            discriminator_loss, model.discriminator, keras.optimizers.Adam(rate, beta_1=0.5)
        ),
        tftpu.Objective(generator_loss, model.generator, keras.optimizers.Adam(rate, beta_1=0.5)),
    ]


SCRIPT = Script(Gan, (uniform(8, 8, 1), normal(4)), objectives=objectives, preflight=True)
