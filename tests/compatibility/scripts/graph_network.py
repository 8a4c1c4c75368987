"""Message passing over molecules: dense adjacency, a GRU cell, pooled atoms."""

import keras
from keras import layers, ops

from tests.compatibility.data import integers, normal, uniform
from tests.compatibility.running import Script

ATOMS, WIDTH = 6, 8


class MessagePassing(layers.Layer):
    def __init__(self, rounds=2):
        super().__init__()
        self.rounds = rounds
        self.message = layers.Dense(WIDTH, use_bias=False)
        self.cell = layers.GRUCell(WIDTH)

    def call(self, atoms, bonds):
        for _ in range(self.rounds):
            messages = bonds @ self.message(atoms)  # (batch, atoms, width)
            flat = ops.reshape(messages, (-1, WIDTH)), ops.reshape(atoms, (-1, WIDTH))
            atoms = ops.reshape(self.cell(*flat)[0], (-1, ATOMS, WIDTH))
        return atoms


def model() -> keras.Model:
    atoms, bonds = keras.Input((ATOMS, 5)), keras.Input((ATOMS, ATOMS))
    x = MessagePassing()(layers.Dense(WIDTH)(atoms), bonds)
    x = layers.Dense(8, activation="relu")(layers.GlobalAveragePooling1D()(x))
    net = keras.Model([atoms, bonds], layers.Dense(1, activation="sigmoid")(x))
    net.compile("adam", "binary_crossentropy", metrics=["AUC"])
    return net


BONDS = (uniform(ATOMS, ATOMS) < 0.4).astype("float32")
SCRIPT = Script(model, ((normal(ATOMS, 5), BONDS), integers(0, 2, 1)))
