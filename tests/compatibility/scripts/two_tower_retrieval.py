"""Two-tower retrieval: users and films; the other films of the batch are the negatives."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import integers
from tests.compatibility.running import Script


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.users = keras.Sequential([layers.Embedding(30, 8), layers.Dense(8)])
        self.films = keras.Sequential([layers.Embedding(20, 8), layers.Dense(8)])

    def call(self, inputs):
        return self.users(inputs["user"]), self.films(inputs["film"])


def loss(model, batch, training):
    users, films = model(batch, training=training)
    scores = users @ ops.transpose(tftpu.all_gather(films))
    return keras.losses.sparse_categorical_crossentropy(
        tftpu.positions(users), scores, from_logits=True
    )


def model() -> keras.Model:
    net = TwoTowers()
    net.compile(keras.optimizers.Adagrad(0.1))
    return net


DATA = {"user": integers(0, 30), "film": integers(0, 20, seed=1)}
SCRIPT = Script(model, DATA, loss_fn=loss)
