"""Generators, callbacks of batches, averages, and metrics and losses of the whole batch."""

import keras
import numpy as np
from keras import layers, ops

from tests.compatibility.data import normal
from tests.compatibility.fitting import Fit, dense


class Recording(keras.callbacks.Callback):
    """Records what its batch methods see, also in the evaluations."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int, dict[str, float]]] = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("train", batch, dict(logs or {})))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test", batch, dict(logs or {})))


class WarmUp(keras.callbacks.Callback):
    """Sets the learning rate before every batch."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        self.model.optimizer.learning_rate = 0.01 * min(1.0, self.batches / 6)


class StopsAt(keras.callbacks.Callback):
    """Ends the run within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.stop_training = True


class Tracking(keras.Model):
    """Measures the size of its outputs in `call`."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        y = self.layer(x)
        self.size.update_state(ops.abs(y))
        return y


class ReadingValues(keras.Model):
    """Reads a value of its input in `call`, which only an eager step has."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)
        self.layer.build((None, 5))

    def call(self, x):
        return self.layer(x) * (2.0 if float(ops.max(ops.abs(x))) > 1.0 else 1.0)


class Missed(keras.metrics.Metric):
    """The share of large labels that are predicted small; its states have short names."""

    def __init__(self):
        super().__init__(name="missed")
        self.fn = self.add_weight(shape=(), initializer="zeros", name="fn")
        self.tp = self.add_weight(shape=(), initializer="zeros", name="tp")

    def update_state(self, y_true, y_pred, sample_weight=None):
        large, found = ops.cast(y_true > 0, "float32"), ops.cast(y_pred > 0, "float32")
        self.fn.assign_add(ops.sum(large * (1.0 - found)))
        self.tp.assign_add(ops.sum(large * found))

    def result(self):
        return self.fn / (self.fn + self.tp + 1e-6)


def correlation(y_true, y_pred):
    """Returns one number for the whole batch."""
    a, b = y_true - ops.mean(y_true), y_pred - ops.mean(y_pred)
    return ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-6)


def correlation_loss(y_true, y_pred):
    """Returns a loss of the whole batch."""
    return 1.0 - correlation(y_true, y_pred) + 0.1 * ops.mean(ops.square(y_true - y_pred))


def built(optimizer=None, layer=None, **arguments):
    """Returns a function that builds a small compiled model."""

    def build():
        model = layer() if layer else keras.Sequential([keras.Input((5,)), dense(1)])
        given = {"loss": "mse", "metrics": ["mae"], **arguments}
        given["metrics"] = given["metrics"]() if callable(given["metrics"]) else given["metrics"]
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(0.01), **given)
        return model

    return build


def stateful():
    """Returns a recurrent model that keeps its state from batch to batch."""
    recurrent = layers.LSTM(
        4, stateful=True, kernel_initializer="ones", recurrent_initializer="ones"
    )
    return keras.Sequential([keras.Input(batch_shape=(16, 5, 1)), recurrent, dense(1)])


def averaging(frequency: int | None = 3):
    return keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=frequency
    )


X = normal(5)
Y = X[:, :1] * 2 - 1
WHOLE = {"x": X, "y": Y, "batch_size": 16, "epochs": 2, "shuffle": False}
VALIDATED = {**WHOLE, "validation_data": (X[:24], Y[:24])}


def batches(count, size=16, endless=False):
    """Yields batches, with a smaller last one."""
    while True:
        for first in range(0, count, size):
            yield X[first : min(first + size, count)], Y[first : min(first + size, count)]
        if not endless:
            return


def weighed():
    """Yields batches with a weight for each example."""
    for first in range(0, 64, 16):
        part = slice(first, first + 16)
        yield X[part], Y[part], abs(X[part, 0])


FITS = {
    "generator": Fit(built(), lambda: {"x": batches(60)}),
    # Keras loses batches of a generator between two validations, so these are arrays.
    "endless_generator": Fit(
        built(),
        lambda: {
            "x": batches(64, endless=True),
            "epochs": 2,
            "steps_per_epoch": 3,
            "validation_data": (X[:24], Y[:24]),
        },
    ),
    "weighed_generator": Fit(built(), lambda: {"x": weighed()}),
    "remainder": Fit(built(), lambda: {**WHOLE, "x": X[:58], "y": Y[:58]}),
    "uneven": Fit(built(), lambda: {**VALIDATED, "batch_size": 10}),
    "split": Fit(built(), lambda: {**WHOLE, "validation_split": 0.27}),
    "recording": Fit(built(), lambda: {**VALIDATED, "callbacks": [Recording()]}),
    "warm_up": Fit(built(), lambda: {**WHOLE, "callbacks": [WarmUp(), Recording()]}),
    "stops_within_an_epoch": Fit(built(), lambda: {**WHOLE, "callbacks": [StopsAt(), Recording()]}),
    "executions": Fit(
        built(steps_per_execution=2), lambda: {**VALIDATED, "callbacks": [Recording()]}
    ),
    "averages": Fit(built(averaging), lambda: VALIDATED, one_device=True),
    "swapped_averages": Fit(
        built(averaging),
        lambda: {**VALIDATED, "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]},
        one_device=True,
    ),
    "averages_of_a_run": Fit(built(lambda: averaging(None)), lambda: VALIDATED),
    "whole_batch_metric": Fit(built(metrics=[correlation]), lambda: VALIDATED),
    "whole_batch_loss": Fit(built(loss=correlation_loss), lambda: VALIDATED),
    "tracking": Fit(built(layer=Tracking), lambda: VALIDATED, on_jax=False),
    "stateful": Fit(
        built(layer=stateful),
        lambda: {**WHOLE, "x": np.tanh(X)[..., None]},
        on_jax=False,
    ),
    "eager": Fit(built(run_eagerly=True), lambda: VALIDATED),
    # On JAX, Keras itself calls it without values first.
    "eager_values": Fit(
        built(layer=ReadingValues, run_eagerly=True),
        lambda: VALIDATED,
        on_jax=False,
    ),
    "own_metric": Fit(built(metrics=lambda: [Missed()]), lambda: VALIDATED),
}
