"""Support tickets: a priority and a department, two losses with weights."""

import keras
from keras import layers

from tests.compatibility.data import integers, normal, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    title, tags = keras.Input((8,), name="title"), keras.Input((4,), name="tags")
    x = layers.Dense(16, activation="relu")(layers.Concatenate()([title, tags]))
    outputs = {
        "priority": layers.Dense(1, activation="sigmoid", name="priority")(x),
        "department": layers.Dense(4, activation="softmax", name="department")(x),
    }
    net = keras.Model({"title": title, "tags": tags}, outputs)
    losses = {"priority": "mean_squared_error", "department": "sparse_categorical_crossentropy"}
    net.compile(
        keras.optimizers.RMSprop(1e-3),
        losses,
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"priority": ["mae"], "department": ["accuracy"]},
    )
    return net


Y = {"priority": uniform(1), "department": integers(0, 4)}
SCRIPT = Script(model, ({"title": normal(8), "tags": normal(4, seed=1)}, Y))
