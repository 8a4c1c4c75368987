"""Miniature GPT: token and position embeddings, causal attention, next-token loss."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers
from tests.compatibility.running import Script

VOCABULARY, LENGTH, WIDTH = 20, 10, 16


class Embeddings(layers.Layer):
    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(VOCABULARY, WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, tokens):
        return self.tokens(tokens) + self.positions(ops.arange(LENGTH))


def block(x):
    attended = layers.MultiHeadAttention(2, WIDTH // 2)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(2 * WIDTH, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))


def model() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = block(Embeddings()(tokens))
    net = keras.Model(tokens, layers.Dense(VOCABULARY)(x))
    net.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return net


ROWS = integers(0, VOCABULARY, LENGTH + 1)
SCRIPT = Script(model, (ROWS[:, :-1], ROWS[:, 1:]), sparse=True, preflight=True)
