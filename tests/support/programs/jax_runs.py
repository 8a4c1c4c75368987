"""Runs a trainer on the JAX engine, for `tests/training/test_jax_runs.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_runs FOLDER

FOLDER/shared holds a run of the first half of the steps, and FOLDER/results.npz what was found. A
run that another engine began in FOLDER/half is ended.
"""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tftpu
from tests.support.data.py_batches import Batches, Scaling, UnevenBatches
from tests.support.models import zoo
from tftpu import models
from tftpu.engines.engine import Engine
from tftpu.kernels.assignment import assign
from tftpu.models.layers.stochastic_depth import StochasticDepth

HALF, STEPS = 6, 12
BEGUN = "half"  # the folder of a run of another engine
WEIGHTS = "model.safetensors"  # of the model that `loaded` loads


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns 60 examples: the batches of 16 of an epoch end with a smaller one."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 6)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)


def trainer_of(mesh: str | None, workdir: Path | None, **cluster: Any) -> tftpu.Trainer:
    """Returns a trainer of a model with batch statistics, float16's loss scale and averages."""
    engine = tftpu.connect("none", mesh=mesh, **cluster)
    keras.utils.set_random_seed(4)
    bias = keras.initializers.RandomNormal(stddev=0.1, seed=5)
    with engine.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(1024, "tanh", bias_initializer=bias, name="first"),
                keras.layers.Dense(3, name="last"),
            ],
            name="mlp",
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9), 64.0, 4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    for index, variable in enumerate(model.trainable_variables):
        rng = np.random.default_rng(index)  # Keras's backends draw different numbers
        variable.assign(rng.uniform(-0.2, 0.2, variable.shape).astype("float32"))
    options = tftpu.TrainConfig(ema_momentum=0.9, checkpoint_every=HALF, steps_per_loop=3)
    return tftpu.Trainer(model, str(workdir) if workdir else None, options, engine=engine)


def fitted(trainer: tftpu.Trainer, steps: int) -> tftpu.Trainer:
    """Trains up to a step, on arrays in an order that depends on the seed only."""
    x, y = data()
    trainer.fit(x, y, batch_size=16, steps=steps, verbose=0)
    return trainer


def weights_of(trainer: tftpu.Trainer) -> list[np.ndarray]:
    """Returns the trainable weights of a trainer's model, and their averages."""
    own = [keras.ops.convert_to_numpy(v) for v in trainer.model.trainable_variables]
    return [*own, *trainer.executor.averaged_weights().values()]


def losses_with_random_depth(mesh: str, microbatches: int, devices: int) -> list[float]:
    """Returns the losses of a model that drops branches of single examples."""
    engine = tftpu.connect("none", virtual_devices=devices, mesh=mesh)
    inputs = keras.Input((6,))
    ones = keras.initializers.Ones()
    branch = StochasticDepth(0.5, name="depth")(keras.layers.Dense(6, "tanh", True, ones)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, None, True, ones)(inputs + branch))
    model.compile("sgd", keras.losses.MeanSquaredError())
    options = tftpu.TrainConfig(gradient_accumulation_steps=microbatches)
    x, y = data()
    trainer = tftpu.Trainer(model, None, options, engine=engine)
    history = trainer.fit(x[:48], np.eye(3)[y[:48]], batch_size=16, epochs=3, verbose=0)
    return history.history["loss"]


def losses_of_odd_batches(mesh: str, devices: int) -> list[float]:
    """Returns the losses of batches that four devices cannot share equally."""
    x, y = data()
    history = trainer_of(mesh, None, virtual_devices=devices).fit(
        x, y, batch_size=6, epochs=2, verbose=0
    )
    return history.history["loss"]


def created(mesh: str) -> tuple[np.ndarray, float]:
    """Returns a new kernel in a scope, and the largest part of it that a device holds."""
    engine = tftpu.connect("none", virtual_devices=4, mesh=mesh)
    keras.utils.set_random_seed(3)
    with engine.scope():
        layer = keras.layers.Dense(48)
        layer.build((None, 512))
        model = keras.Sequential([keras.Input((512,)), layer])
        model.predict(np.ones((4, 512), "float32"), verbose=0)  # Keras's own works in the scope
    value = layer.kernel.value
    largest = max(shard.data.size for shard in value.addressable_shards)
    return np.asarray(value), largest / value.size


def loaded(file: Path) -> dict[str, Any]:
    """Loads weights onto a mesh; returns the largest parts that were read and are held."""
    read: list[float] = []

    class Seen(np.ndarray):
        def __getitem__(self, place):
            found = np.asarray(super().__getitem__(place))
            read.append(found.size / self.size)
            return found

    engine = tftpu.connect("none", virtual_devices=4, mesh="fsdp:4")
    with engine.scope():
        model = zoo.build("llama", width=64, hidden=128)
        kernel = keras.Variable(np.zeros((64, 128), "float32"), name="kernel")
    models.load_weights(model, str(file))
    assign(kernel, np.ones((64, 128), "float32").view(Seen))
    held = max(s.data.size for s in kernel.value.addressable_shards) / (64 * 128)
    weights = {f"loaded {v.path}": np.asarray(v.value) for v in model.weights}
    return {"largest read": max(read), "largest held": held, **weights}


def begun(engine: Engine) -> list[np.ndarray]:
    """Returns the initial weights of a model with every way to draw them."""
    keras.utils.set_random_seed(3)
    with engine.scope():
        model = keras.Sequential(
            [
                keras.layers.Embedding(20, 16),
                keras.layers.LSTM(12, kernel_initializer="he_normal"),
                keras.layers.Dense(512, kernel_initializer=keras.initializers.RandomNormal(2.0)),
                keras.layers.Dense(16, bias_initializer="lecun_uniform"),
                keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.5)),
            ]
        )
        model.build((None, 6))
        return [variable.numpy() for variable in model.weights]


def named(engine: Engine) -> dict[str, list[float]]:
    """Returns the history of a loss function whose values are not in the order of their names."""
    with engine.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd")

    def loss_fn(model, batch, training):
        loss = keras.ops.sum(model(batch, training=training), axis=-1)
        return loss, {"two": 0.0 * loss + 2.0, "one": 0.0 * loss + 1.0}

    trainer = tftpu.Trainer(model, loss_fn=loss_fn)
    return trainer.fit(np.ones((8, 3), "float32"), batch_size=8, verbose=0).history


def masked(engine: Engine) -> list[float]:
    """Returns the losses of a model whose padding has a mask and whose loss ignores a class."""
    keras.utils.set_random_seed(1)
    with engine.scope():
        layers = [
            keras.layers.Embedding(9, 8, mask_zero=True),
            keras.layers.GRU(8, return_sequences=True),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        model.compile("sgd", loss)
    rng = np.random.default_rng(5)
    tokens, labels = (rng.integers(0, high, (32, 6)).astype("int32") for high in (4, 4))
    history = tftpu.Trainer(model).fit(tokens, labels, batch_size=8, shuffle=False, verbose=0)
    return history.history["loss"]


def changed(engine: Engine, generated: bool) -> tuple[list[float], list[float]]:
    """Returns the losses of data that a callback changes after each epoch: ours, and Keras's."""
    found = []
    for by_keras in (False, True):
        keras.utils.set_random_seed(1)
        with contextlib.nullcontext() if by_keras else engine.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.set_weights([np.full((6, 4), 0.1, "float32"), np.zeros(4, "float32")])
        fit = model.fit if by_keras else tftpu.Trainer(model).fit
        given = Batches(40, 8)
        batches = given.generated() if generated else given
        history = fit(batches, epochs=4, shuffle=False, callbacks=[Scaling(given)], verbose=0)
        found.append(history.history["loss"])
    return found[0], found[1]


def slots_held(mesh: str) -> float:
    """Returns the largest part of a moment of Adam that a device holds, at its creation."""
    engine = tftpu.connect("none", virtual_devices=4, mesh=mesh)
    held = []

    class Seen(keras.optimizers.Adam):
        def build(self, variables):
            super().build(variables)
            for slot in self.variables:
                if slot.shape == (512, 48):
                    shards = slot.value.addressable_shards
                    held.append(max(s.data.size for s in shards) / slot.value.size)

    with engine.scope():
        model = keras.Sequential([keras.layers.Dense(48)])
        model.compile(Seen(), "mse")
    trainer = tftpu.Trainer(model)
    trainer.fit(np.ones((8, 512), "float32"), np.ones((8, 48), "float32"), batch_size=8, verbose=0)
    return max(held)


class Largest(keras.metrics.Metric):
    """A metric whose state is not a sum: the largest prediction so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="state")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest.value, keras.ops.max(y_pred)))

    def result(self):
        return self.largest.value


def refusals() -> list[str]:
    """Returns the messages about what the JAX engine cannot train."""
    found = []
    x, y = data()
    for mesh, metric in (("sequence:4", "accuracy"), ("fsdp:4", Largest())):
        try:
            trainer = trainer_of(mesh, None, virtual_devices=4)
            trainer.model.compile("sgd", trainer.model.loss, metrics=[metric])
            trainer.fit(x, y, batch_size=16, epochs=1, verbose=0)
        except tftpu.UserError as error:
            found.append(str(error))
    try:  # the padding of the second batch would count
        trainer_of("fsdp:4", None, virtual_devices=4).fit(UnevenBatches([16, 8, 16, 8]), verbose=0)
    except tftpu.UserError as error:
        found.append(str(error))
    return found


def main(folder: Path) -> dict[str, Any]:
    """Returns the weights after all steps, trained in different ways."""
    x, y = data()
    straight = fitted(trainer_of("fsdp:4", None, virtual_devices=4), STEPS)
    fitted(trainer_of("fsdp:4", folder / "shared", virtual_devices=4), HALF)
    found = {"straight": weights_of(straight)}
    for name, mesh in (("same mesh", "fsdp:4"), ("other mesh", "data:2,fsdp:2")):
        shutil.copytree(folder / "shared", folder / name)
        resumed = fitted(trainer_of(mesh, folder / name, virtual_devices=4), STEPS)
        found[name] = weights_of(resumed)
    if (folder / BEGUN).exists():
        found[BEGUN] = weights_of(
            fitted(trainer_of("fsdp:4", folder / BEGUN, virtual_devices=4), STEPS)
        )
    results = {
        f"{name} {i}": weight for name, all_ in found.items() for i, weight in enumerate(all_)
    }
    results["predicted"] = straight.predict(x, batch_size=16)
    evaluated = straight.evaluate(x, y, batch_size=16, return_dict=True)
    results["evaluated"] = [evaluated["loss"], evaluated["accuracy"]]
    for variable, value in zip(straight.model.trainable_variables, found["straight"][4:]):
        variable.assign(value)  # Keras evaluates with the weights, not with their averages
    results["predicted by Keras"] = straight.model.predict(x, verbose=0)
    straight.model.compile(loss=straight.model.loss, metrics=["accuracy"])
    results["evaluated by Keras"] = straight.model.evaluate(x, y, batch_size=16, verbose=0)
    epochs = trainer_of("fsdp:4", None, virtual_devices=4)
    history = epochs.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    results["depth on one device"] = losses_with_random_depth("data:1", 1, devices=1)
    results["depth on four devices"] = losses_with_random_depth("data:2,fsdp:2", 2, devices=4)
    results["odd on one device"] = losses_of_odd_batches("data:1", devices=1)
    results["odd on four devices"] = losses_of_odd_batches("data:2,fsdp:2", devices=4)
    for mesh in ("data:4", "fsdp:4", "fsdp:2,tensor:2"):
        results[f"created on {mesh}"], results[f"held on {mesh}"] = created(mesh)
    results["slots held"] = slots_held("fsdp:4")
    results |= loaded(folder / WEIGHTS)
    for index, value in enumerate(begun(tftpu.connect("none", 4, mesh="fsdp:4"))):
        results[f"begun {index}"] = value
    found = named(tftpu.connect("none", 4, mesh="data:4"))
    results["named"] = [found[name] for name in ("one", "two")]
    results["masked"] = masked(tftpu.connect("none", 4, mesh="fsdp:4"))
    results["refusals"] = refusals()
    for generated in (False, True):
        losses = changed(tftpu.connect("none", 4, mesh="fsdp:4"), generated)
        results[f"changed, generated: {generated}"] = np.array(losses)
    for devices in (1, 4):
        trainer = trainer_of(f"data:{devices}", None, virtual_devices=devices)
        results[f"predicted on {devices}"] = trainer.predict(x, batch_size=16)
    results["epochs"] = history.history["loss"]
    return results


if __name__ == "__main__":
    np.savez(Path(sys.argv[1]) / "results.npz", **main(Path(sys.argv[1])))
