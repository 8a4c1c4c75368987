"""Character-level translation: an LSTM passes its states to another."""

import keras
from keras import layers

from tests.compatibility.data import integers
from tests.compatibility.running import Script

CHARACTERS, WIDTH = 12, 8


def model() -> keras.Model:
    source, target = keras.Input((7, CHARACTERS)), keras.Input((6, CHARACTERS))
    _, *states = layers.LSTM(WIDTH, return_state=True)(source)
    decoded = layers.LSTM(WIDTH, return_sequences=True)(target, initial_state=states)
    outputs = layers.Dense(CHARACTERS, activation="softmax")(decoded)
    net = keras.Model([source, target], outputs)
    net.compile("rmsprop", "categorical_crossentropy", metrics=["accuracy"])
    return net


SOURCE = keras.utils.to_categorical(integers(0, CHARACTERS, 7), CHARACTERS)
TARGET = keras.utils.to_categorical(integers(0, CHARACTERS, 7, seed=1), CHARACTERS)
SCRIPT = Script(model, ((SOURCE, TARGET[:, :-1]), TARGET[:, 1:]))
