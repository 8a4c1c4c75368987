"""Deep Q-learning on recorded steps, with a fixed target network."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


class Agent(keras.Model):
    def __init__(self):
        super().__init__()
        self.values = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])
        self.target = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])
        self.target.trainable = False

    def call(self, state):
        return self.values(state)


def loss(model, batch, training):
    future = ops.max(model.target(batch["next"]), axis=-1)
    expected = batch["reward"] + 0.99 * ops.stop_gradient(future)
    value = ops.sum(model(batch["state"]) * ops.one_hot(batch["action"], 3), axis=-1)
    error = ops.abs(expected - value)
    return ops.where(error < 1.0, 0.5 * ops.square(error), error - 0.5)


def model() -> keras.Model:
    net = Agent()
    net.compile(keras.optimizers.Adam(2.5e-4, clipnorm=1.0))
    return net


STEPS = {"state": normal(4), "next": normal(4, seed=1), "reward": normal(seed=2)}
SCRIPT = Script(model, {**STEPS, "action": integers(0, 3)}, loss_fn=loss)
