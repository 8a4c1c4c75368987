"""Rare frauds: examples with weights, several metrics."""

import keras
import numpy as np
from keras import layers

from tests.compatibility.data import normal, uniform
from tests.compatibility.running import Script


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.0),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
    net.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", weighted_metrics=metrics)
    return net


FRAUD = (uniform(1, seed=1) < 0.2).astype("float32")
WEIGHTS = np.where(FRAUD[:, 0] > 0, 4.0, 1.0).astype("float32")
SCRIPT = Script(model, (normal(8), FRAUD, WEIGHTS))
