"""Barlow Twins: the cross-correlation of two views, over the whole batch."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import normal
from tests.compatibility.running import Script


def standardized(x):
    return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


def loss(model, batch, training):
    views = [tftpu.all_gather(model(view, training=training)) for view in batch]
    one, other = (standardized(view) for view in views)  # of all devices
    correlation = ops.transpose(one) @ other / one.shape[0]
    diagonal = ops.eye(correlation.shape[0])
    error = ops.square(correlation - diagonal)
    total = ops.sum(error * diagonal) + 5e-3 * ops.sum(error * (1.0 - diagonal))
    return ops.broadcast_to(total, batch[0].shape[:1])


def model() -> keras.Model:
    net = keras.Sequential([keras.Input((10,)), layers.Dense(12, "relu"), layers.Dense(4)])
    net.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return net


X = normal(10)
SCRIPT = Script(model, (X, X + 0.1 * normal(10, seed=1)), loss_fn=loss)
