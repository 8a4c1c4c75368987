"""Mixture density network: the model's own `compute_loss` is a mean, as in Keras."""

import keras
from keras import layers, ops

from tests.compatibility.data import normal
from tests.compatibility.running import Script


class MixtureDensity(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(16, activation="tanh"), layers.Dense(9)

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        means, log_scales, logits = ops.split(y_pred, 3, axis=-1)
        errors = ops.square((y - means) * ops.exp(-log_scales))
        return -ops.mean(
            ops.logsumexp(ops.log_softmax(logits) - 0.5 * errors - log_scales, axis=-1)
        )


def model() -> keras.Model:
    net = MixtureDensity()
    net.compile(keras.optimizers.Adam(1e-3))
    return net


SCRIPT = Script(model, (normal(3), normal(1, seed=1)))
