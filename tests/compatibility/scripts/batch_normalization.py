"""Image classifier with Keras's batch normalization."""

import keras
from keras import layers

from tests.compatibility.data import integers, uniform
from tests.compatibility.running import BATCH_STATISTICS, Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="softmax"),
        ]
    )
    net.compile("sgd", "sparse_categorical_crossentropy")
    return net


SCRIPT = Script(model, (uniform(8, 8, 3), integers(0, 5)), differs=BATCH_STATISTICS)
