"""Wide and deep: crossed categories beside embeddings and numbers."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal
from tests.compatibility.running import Script


def model() -> keras.Model:
    inputs = {
        "age": keras.Input((1,), name="age"),
        "job": keras.Input((1,), dtype="int32", name="job"),
        "town": keras.Input((1,), dtype="int32", name="town"),
    }
    job, town = inputs["job"], inputs["town"]
    wide = layers.CategoryEncoding(12, output_mode="one_hot")(job * 4 + town)
    deep = [layers.Flatten()(layers.Embedding(4, 3)(x)) for x in (job, town)]
    deep = layers.Concatenate()([inputs["age"], *deep])
    for units in (16, 8):
        deep = layers.Dense(units, activation="relu")(deep)
    outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([wide, deep]))
    net = keras.Model(inputs, outputs)
    net.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return net


X = {"age": normal(1), "job": integers(0, 3, 1), "town": integers(0, 4, 1, seed=1)}
SCRIPT = Script(model, (X, integers(0, 2, 1, seed=2)), sparse=True, preflight=True)
