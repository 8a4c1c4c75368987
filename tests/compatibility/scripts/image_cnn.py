"""Image classifier: convolutions, pooling, a softmax."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(10, activation="softmax"),
        ]
    )
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (uniform(12, 12, 1), integers(0, 10)))
