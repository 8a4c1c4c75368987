"""Deep and cross network: explicit products of features."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    features = keras.Input((6,))
    cross = features
    for _ in range(2):
        cross = features * layers.Dense(6)(cross) + cross
    deep = layers.Dense(8, activation="relu")(features)
    outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([cross, deep]))
    net = keras.Model(features, outputs)
    net.compile(keras.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=["accuracy"])
    return net


SCRIPT = Script(model, (normal(6), integers(0, 2)))
