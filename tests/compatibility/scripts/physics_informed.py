"""Physics-informed network: the derivatives of its output follow an oscillator's equation."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.compatibility.data import uniform
from tests.compatibility.running import Script


def loss(model, batch, training):
    with tf.GradientTape() as outer:
        outer.watch(batch)
        with tf.GradientTape() as inner:
            inner.watch(batch)
            position = model(batch, training=training)
        speed = inner.gradient(position, batch)
    acceleration = outer.gradient(speed, batch)
    equation = acceleration + 4.0 * position
    start = ops.square(model(ops.zeros_like(batch)) - 1.0)
    return ops.square(equation)[:, 0] + start[:, 0]


def model() -> keras.Model:
    net = keras.Sequential(
        [keras.Input((1,)), layers.Dense(16, "tanh"), layers.Dense(16, "tanh"), layers.Dense(1)]
    )
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, uniform(1), loss_fn=loss)
