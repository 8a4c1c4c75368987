"""Several labels for one text: bags of words, focal loss."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((10,), dtype="int32"),
            layers.CategoryEncoding(30, output_mode="multi_hot"),
            layers.Dense(16, activation="relu"),
            layers.Dense(6, activation="sigmoid"),
        ]
    )
    net.compile("adam", keras.losses.BinaryFocalCrossentropy(), metrics=["binary_accuracy"])
    return net


SCRIPT = Script(model, (integers(0, 30, 10), (uniform(6) < 0.3).astype("float32")))
