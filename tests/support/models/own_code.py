"""Models and losses as users write them, on both engines.

    KERAS_BACKEND=jax python -m tests.support.models.own_code RESULTS.npz

RESULTS holds the weights and the losses of every case in `CASES`, as "CASE DEVICES NUMBER".
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import tftpu

RNG = np.random.default_rng(7)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.normal(size=(64, 1)).astype("float32")
LABELS = RNG.integers(0, 4, 64)
WEIGHTS = RNG.uniform(0.2, 2.0, 64).astype("float32")
RUN: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


class MaskedDense(keras.layers.Dense):
    """Sets a half of its kernel to zero whenever it is called, as masked convolutions do."""

    def call(self, inputs, training=None):
        mask = np.arange(self.kernel.shape[0])[:, None] % 2
        self.kernel.assign(self.kernel * mask.astype("float32"))
        return super().call(inputs)


class Whole(keras.losses.Loss):
    """A loss that reduces by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred)) * 3.0


def dense(*layers: keras.Layer, loss: Any = "mse") -> keras.Model:
    """Returns layers, and one unit behind them, compiled."""
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def spectral() -> keras.Model:
    """Returns a model whose layer divides its kernel by its norm in each step."""
    return dense(keras.layers.SpectralNormalization(keras.layers.Dense(5)))


def outputs(loss: keras.losses.Loss, weight: Any = 0.5) -> keras.Model:
    """Returns a model of two outputs, of which one has a weight."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    found = {name: keras.layers.Dense(n, name=name)(hidden) for name, n in (("a", 1), ("b", 4))}
    model = keras.Model(inputs, found)
    model.compile("sgd", {"a": "mse", "b": loss}, loss_weights={"a": weight, "b": 1.0})
    return model


def crossentropy(**options: Any) -> keras.losses.Loss:
    """Returns a loss from logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


TWO = {"a": Y, "b": LABELS}
# The model, and what it is fitted to.
CASES: dict[str, tuple[Callable[[], keras.Model], tuple]] = {
    "spectral": (spectral, (Y,)),
    "masked": (lambda: dense(MaskedDense(5)), (Y,)),
    "whole": (lambda: dense(loss=Whole()), (Y,)),
    "ignoring": (lambda: outputs(crossentropy(ignore_class=2)), (TWO,)),
    "weighted": (
        lambda: outputs(crossentropy(reduction="mean_with_sample_weight")),
        (TWO, {"a": WEIGHTS, "b": WEIGHTS[::-1].copy()}),
    ),
    "variable": (
        lambda: outputs(crossentropy(), keras.Variable(0.25, trainable=False)),
        (TWO,),
    ),
}


def fitted(case: str, engine: Any = None, microbatches: int = 1) -> list[np.ndarray]:
    """Returns the weights of a model after training, and its losses; by Keras without an engine."""
    make, (y, *weights) = CASES[case]
    if engine is None:
        model = make()
    else:
        with engine.scope():
            model = make()
    for index, variable in enumerate(model.weights):
        if "seed" not in variable.path:
            values = np.random.default_rng(index).uniform(-0.5, 0.5, variable.shape)
            variable.assign(values.astype("float32"))
    options = {**RUN, "sample_weight": weights[0] if weights else None}
    options["validation_data"] = (X, y, *weights)
    if engine is None:
        losses = model.fit(X, y, **options).history
    else:
        trained = tftpu.TrainConfig(gradient_accumulation_steps=microbatches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a loss that is one number
            losses = tftpu.Trainer(model, None, trained).fit(X, y, **options).history
    model(X[:1])  # as an evaluation by Keras, which keeps what layers assign in it
    weights = [ops.convert_to_numpy(v) for v in model.weights]
    return [*weights, np.array(losses["loss"]), np.array(losses["val_loss"])]


def uncompiled() -> keras.Model:
    """Returns a model without a loss."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    return model


def read_from_the_optimizer(engine: Any) -> list[list[float]]:
    """Returns, for each of two epochs, what a loss reads of the optimizer.

    The mean of the steps done and the rate, in training, and both at the end, in evaluation.
    """

    def loss_fn(model, batch, training):
        loss = ops.square(model(batch[0], training=training) - batch[1])[:, 0]
        optimizer = model.optimizer
        read = {"steps": optimizer.iterations, "rate": optimizer.learning_rate}
        return loss, {k: ops.cast(v, "float32") + 0.0 * loss for k, v in read.items()}

    with engine.scope():
        model = uncompiled()
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5**epoch / 64)
    trainer = tftpu.Trainer(model, loss_fn=loss_fn)
    history = trainer.fit(X, Y, **RUN, callbacks=halving, validation_data=(X, Y)).history
    return [history[name] for name in ("steps", "rate", "val_steps", "val_rate")]


def main() -> dict[str, np.ndarray]:
    """Returns what each case gives on one device and on four."""
    found: dict[str, np.ndarray] = {}
    for devices in (4, 1):
        engine = tftpu.connect("none", 4 if devices == 4 else 1, mesh=f"data:{devices}")
        for case in CASES:
            for number, value in enumerate(fitted(case, engine)):
                found[f"{case} {devices} {number}"] = value
        found[f"optimizer {devices}"] = np.array(read_from_the_optimizer(engine))
    for number, value in enumerate(fitted("spectral", engine, microbatches=2)):
        found[f"spectral in microbatches {number}"] = value
    return found


def messages() -> dict[str, str]:
    """Returns the messages about what cannot be trained, on JAX alone."""
    engine = tftpu.connect("none", 4, mesh="data:4")
    factor = keras.Variable(1.0, name="factor", trainable=False)

    def lookup() -> keras.Model:
        inputs = keras.Input((6,), dtype="int32")
        found = keras.layers.IntegerLookup(vocabulary=[1, 2], name="lookup")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(ops.cast(found, "float32")))
        model.compile("sgd", "mse")
        return model

    def classes() -> keras.Model:
        return dense(keras.layers.Dense(4), loss=crossentropy())

    def read(model, batch, training):
        return ops.square(model(batch[0], training=training) - batch[1])[:, 0] * factor

    setting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: factor.assign(2.0))
    nan = np.where(LABELS == 0, np.nan, LABELS * 0).astype("float32")
    cases = {
        "lookup": (lookup, None, Y, None),
        "nan": (classes, None, nan, None),
        "read": (uncompiled, read, Y, setting),
    }
    found = {}
    for name, (make, loss_fn, y, callback) in cases.items():
        try:
            with engine.scope():
                model = make()
            trainer = tftpu.Trainer(model, loss_fn=loss_fn)
            trainer.fit(X, y, **RUN, callbacks=callback)
        except Exception as error:
            found[f"message {name}"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **main(), **messages())
