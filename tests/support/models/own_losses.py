"""Models and losses of users: contrastive learning, and a GAN."""

import keras
import tensorflow as tf
from keras import ops

import tftpu

STEPS, BATCH, EXAMPLES, FEATURES = 6, 16, 56, 6


class Gan(keras.Model):
    """A generator and a critic, trained by two objectives."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(2)
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(FEATURES)])
        self.critic = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, noise):
        return self.generator(noise)


def critic_loss(model, batch, training):
    x, noise = batch
    fake = model.generator(noise)
    mixed = 0.5 * (x + fake)
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        score = model.critic(mixed)
    slope = ops.sqrt(ops.sum(ops.square(tape.gradient(score, mixed)), axis=-1) + 1e-12)
    penalty = ops.square(slope - 1.0)
    return (model.critic(fake) - model.critic(x))[:, 0] + 10.0 * penalty, {"penalty": penalty}


def generator_loss(model, batch, training):
    return -model.critic(model.generator(batch[1]))[:, 0]


class Encoder(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.out = keras.layers.Dense(4)

    def call(self, x):
        return self.out(x)


def contrastive_loss(model, batch, training):
    """SimCLR's loss in one direction: x and its noised copy among all examples of the batch."""
    x, noise = batch
    one = ops.normalize(model(x), axis=-1)
    other = ops.normalize(model(x + 0.1 * ops.concatenate([noise, noise], -1)), axis=-1)
    logits = one @ ops.transpose(tftpu.all_gather(other)) / 0.5
    return keras.losses.sparse_categorical_crossentropy(
        tftpu.positions(one), logits, from_logits=True
    )
