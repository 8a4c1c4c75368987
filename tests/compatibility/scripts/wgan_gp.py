"""Wasserstein GAN with a gradient penalty; the generator learns at every third step."""

import keras
import tensorflow as tf
from keras import layers, ops

import tftpu
from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(8, 3, strides=2, activation="tanh"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(36, activation="sigmoid"),
                layers.Reshape((6, 6, 1)),
                layers.Conv2D(1, 3, padding="same"),
            ]
        )

    def call(self, noise):
        return self.generator(noise)


def critic_loss(model, batch, training):
    images, noise, share = batch
    fake = model.generator(noise, training=training)
    mixed = share * images + (1.0 - share) * fake
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        score = model.critic(mixed, training=training)
    slopes = ops.sum(ops.square(tape.gradient(score, mixed)), axis=(1, 2, 3))
    penalty = ops.square(ops.sqrt(slopes + 1e-12) - 1.0)
    cost = model.critic(fake, training=training) - model.critic(images, training=training)
    return cost[:, 0] + 10.0 * penalty


def generator_loss(model, batch, training):
    return -model.critic(model.generator(batch[1], training=training), training=training)[:, 0]


def objectives(model):
    adam = {"learning_rate": 1e-3, "beta_1": 0.5, "beta_2": 0.9}
    generator = keras.optimizers.Adam(**adam)
    return [
        tftpu.Objective(critic_loss, model.critic, keras.optimizers.Adam(**adam)),
        tftpu.Objective(generator_loss, model.generator, generator, every=3),
    ]


SCRIPT = Script(Gan, (uniform(6, 6, 1), normal(4), uniform(1, 1, 1, seed=1)), objectives=objectives)
