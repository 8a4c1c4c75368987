"""Film ratings from the product of two embeddings, with biases and a regularizer."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


class Recommender(keras.Model):
    def __init__(self):
        super().__init__()
        decay = keras.regularizers.L2(1e-4)
        self.users = layers.Embedding(30, 6, embeddings_regularizer=decay)
        self.films = layers.Embedding(20, 6, embeddings_regularizer=decay)
        self.user_bias, self.film_bias = layers.Embedding(30, 1), layers.Embedding(20, 1)

    def call(self, pairs):
        user, film = pairs[:, 0], pairs[:, 1]
        match = ops.sum(self.users(user) * self.films(film), axis=-1, keepdims=True)
        return ops.sigmoid(match + self.user_bias(user) + self.film_bias(film))


def model() -> keras.Model:
    net = Recommender()
    net.compile("adam", "binary_crossentropy")
    return net


SCRIPT = Script(model, (integers(0, 20, 2), uniform(1)), sparse=True)
