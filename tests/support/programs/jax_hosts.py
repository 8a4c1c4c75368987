"""Trains on several hosts of the JAX engine, for `tests/engines/jax/processes/test_hosts.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_hosts FOLDER COUNT MESH...

COUNT processes have four devices in all. FOLDER gets a workdir for each mesh, and the chief writes
what was found to results.npz.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tftpu
from tests.support.programs.jax_runs import data
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.runtime import hosts

WHOLE_EPOCHS = "data:4"  # the mesh on which arrays are trained on
STEPS = 8


class Cut(keras.Sequential):
    """A model whose layers are cut along `tensor`."""

    @property
    def sharding_rules(self):
        return [("first/kernel$", (None, "tensor")), ("last/kernel$", ("tensor", None))]


class Own(keras.Sequential):
    """A model whose own steps run, although they do what Keras's do."""

    def train_step(self, state, data):
        return super().train_step(state, data)


class Records(keras.callbacks.Callback):
    """Records the loss of each batch."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append((logs or {})["loss"])


def trainer_of(
    mesh: str, workdir: Path, count: int, kind: type[keras.Sequential] = Cut, **options: Any
) -> tftpu.Trainer:
    """Returns a trainer of a model with batch statistics, dropout and averages."""
    engine = tftpu.connect(
        "none", virtual_devices=4 // count, engine="jax", mesh=mesh, host_timeout=60.0
    )
    keras.utils.set_random_seed(4)
    with engine.scope():
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(1024, "tanh", use_bias=False, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, name="last"),
        ]
        model = kind(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
    train = tftpu.TrainConfig(checkpoint_every=4, steps_per_loop=2, **options)
    return tftpu.Trainer(model, str(workdir), train, engine=engine)


def pipeline() -> ArrayPipeline:
    """Returns data of which each host reads its own part."""
    return ArrayPipeline(data(), global_batch_size=16, seed=3, prepare=_prepared)


def _prepared(examples: Any, seeds: Any) -> Any:
    x, y = examples
    return x + tf.cast(seeds[:, :1], tf.float32) / 2.0**31, y


def main(folder: Path, count: int, meshes: list[str]) -> dict[str, Any]:
    """Returns the losses, evaluations and predictions on meshes, by name."""
    x, y = data()
    found: dict[str, Any] = {}
    for mesh in meshes:
        exact = {"ema_momentum": 0.9, "global_clipnorm": 1.0}
        trainer = trainer_of(mesh, folder / mesh, count, **exact)
        if mesh == WHOLE_EPOCHS:  # they end with a smaller batch
            history = trainer.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
        else:
            history = trainer.fit(
                pipeline(), steps=STEPS, eval_every=4, validation_data=(x, y), verbose=0
            )
        found[f"{mesh} losses"] = history.history["loss"]
        found[f"{mesh} validation"] = history.history["val_loss"]
        found[f"{mesh} predictions"] = trainer.predict(x, batch_size=16)
    if WHOLE_EPOCHS in meshes:
        trainer, records = trainer_of(WHOLE_EPOCHS, folder / "own", count, Own), Records()
        trainer.fit(x, y, batch_size=16, epochs=1, callbacks=[records], verbose=0)
        found["losses of own steps"] = records.losses
        found["evaluation by own steps"] = trainer.evaluate(x, y, batch_size=16)
        found["predictions by own steps"] = trainer.predict(x, batch_size=16)
    return found


if __name__ == "__main__":
    results = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    if hosts.read_task().chief:
        np.savez(Path(sys.argv[1]) / "results.npz", **results)
