"""Super-resolution: convolutions, then channels become pixels."""

import keras
from keras import layers, ops

from tests.compatibility.data import uniform
from tests.compatibility.running import Script


class DepthToSpace(layers.Layer):
    """(batch, h, w, 4 c) becomes (batch, 2 h, 2 w, c)."""

    def call(self, x):
        _, height, width, channels = x.shape
        x = ops.reshape(x, (-1, height, width, 2, 2, channels // 4))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, 2 * height, 2 * width, channels // 4))


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(8, 5, padding="same", activation="relu"),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            DepthToSpace(),
        ]
    )
    net.compile(keras.optimizers.Adam(1e-3), "mean_squared_error")
    return net


LARGE = uniform(12, 12, 1)
SCRIPT = Script(model, (LARGE[:, ::2, ::2], LARGE))
