"""Actor and critic on recorded steps: each with its own loss and optimizer."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


class Agent(keras.Model):
    def __init__(self):
        super().__init__()
        self.actor = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(2)])
        self.critic = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )

    def call(self, state):
        return self.actor(state)


def actor_loss(model, batch, training):
    gain = ops.stop_gradient(batch["reward"] - model.critic(batch["state"])[:, 0])
    chosen = ops.one_hot(batch["action"], 2)
    return -gain * ops.sum(chosen * ops.log_softmax(model.actor(batch["state"])), axis=-1)


def critic_loss(model, batch, training):
    return ops.square(batch["reward"] - model.critic(batch["state"])[:, 0])


def objectives(model):
    return [
        tftpu.Objective(actor_loss, model.actor, keras.optimizers.Adam(1e-3)),
        tftpu.Objective(critic_loss, model.critic, keras.optimizers.RMSprop(1e-3)),
    ]


DATA = {"state": normal(4), "action": integers(0, 2), "reward": normal(seed=1)}
SCRIPT = Script(Agent, DATA, objectives=objectives)
