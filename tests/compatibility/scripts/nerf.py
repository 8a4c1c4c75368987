"""Neural radiance field: colours and densities along rays, rendered to pixels."""

import keras
import numpy as np
from keras import layers, ops

from tests.compatibility.data import uniform
from tests.compatibility.running import Script

SAMPLES, WAVES = 6, 3


def encoded(points):
    parts = [points]
    for power in range(WAVES):
        parts += [ops.sin(2.0**power * points), ops.cos(2.0**power * points)]
    return ops.concatenate(parts, axis=-1)


def loss(model, batch, training):
    origins, directions, depths, pixels = batch
    points = origins[:, None] + directions[:, None] * depths[..., None]
    found = model(encoded(points), training=training)  # (rays, samples, 4)
    colours, density = ops.sigmoid(found[..., :3]), ops.relu(found[..., 3])
    gaps = ops.concatenate([depths[:, 1:] - depths[:, :-1], ops.ones_like(depths[:, :1])], -1)
    alpha = 1.0 - ops.exp(-density * gaps)
    passed = ops.cumprod(1.0 - alpha + 1e-10, axis=-1)
    reached = ops.concatenate([ops.ones_like(passed[:, :1]), passed[:, :-1]], axis=-1)
    rendered = ops.sum((alpha * reached)[..., None] * colours, axis=1)
    error = ops.mean(ops.square(rendered - pixels), axis=-1)
    return error, {"psnr": -10.0 * ops.log(error) / ops.log(10.0)}


def model() -> keras.Model:
    inputs = keras.Input((SAMPLES, 3 * (1 + 2 * WAVES)))
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.Dense(16, activation="relu")(layers.Concatenate()([x, inputs]))
    net = keras.Model(inputs, layers.Dense(4)(x))
    net.compile("adam")
    return net


DEPTHS = np.sort(uniform(SAMPLES), axis=-1)
RAYS = uniform(3), uniform(3, seed=1), DEPTHS, uniform(3, seed=2)
SCRIPT = Script(model, RAYS, loss_fn=loss)
