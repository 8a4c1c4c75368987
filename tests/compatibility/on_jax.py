"""Trains the scripts under Keras's JAX backend and on the JAX engine; prints the differences.

    KERAS_BACKEND=jax python -m tests.compatibility.on_jax [NAME ...]

One line of JSON for each script: its name, the differences on one device and on a mesh of four, and
how far training went; or an error.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

import tftpu
from tests.compatibility import running
from tests.compatibility.data import STEPS
from tests.compatibility.running import Differences, Script, Trained
from tftpu import Objective
from tftpu.engines.jax.placement import initial

MESH = "data:2,fsdp:2"
# Scripts that do not run on Keras's JAX backend: they call TensorFlow, or pass a variable to
# `keras.ops.where`, which that backend refuses.
NOT_ON_JAX = ("masked_autoencoder", "physics_informed", "wgan_gp")
# tagging_gru: Keras's JAX `fit` leaves the mask out of metrics, and so differs from Keras's own.


def compare(script: Script) -> Differences:
    """Trains in all three ways; returns the differences."""
    with initial.as_tensorflow():  # the weights that a scope gives
        expected = by_keras(script)
    one = running.difference(by_trainer(script, 1, None), expected)
    four = running.difference(by_trainer(script, 4, MESH), expected)
    return Differences(one, four, running.relative(expected.weights, expected.before))


def by_keras(script: Script) -> Trained:
    """Trains with Keras's `fit`, or where it has none of the logic, by hand in plain JAX."""
    model = script.built()
    if script.loss_fn or script.objectives:
        return running.by_hand(model, _batches(script), script.objectives_of(model), _step)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(_batches(script)[0])
    if not model.built:
        model(x)
    if running.computes_each_loss(model, x, y, weight):
        objectives = [Objective(running.computed_loss, None, model.optimizer)]
        return running.by_hand(model, _batches(script), objectives, _step)
    before = running.weights(model)
    history = model.fit(script.batches(), epochs=STEPS, steps_per_epoch=1, shuffle=False, verbose=0)
    return Trained(before, running.weights(model), history.history)


def by_trainer(script: Script, devices: int, mesh: str | None) -> Trained:
    """Trains with `tftpu.Trainer` on the JAX engine."""
    engine = tftpu.connect("none", virtual_devices=devices, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with engine.scope():
            model = script.built()
            objectives = script.objectives(model) if script.objectives else ()
            trainer = tftpu.Trainer(model, loss_fn=script.loss_fn, objectives=objectives)
        before = running.weights(model)
        history = trainer.fit(script.batches(), steps=STEPS, eval_every=1, verbose=0)
    return Trained(before, running.weights(model), history.history)


def _batches(script: Script) -> list[Any]:
    return [keras.tree.map_structure(jax.numpy.asarray, b) for b in script.batches()]


def _step(model: keras.Model, objective: Objective) -> Callable[[Any], Any]:
    """Returns one step of an objective in plain JAX."""
    chosen = objective.variables
    if chosen is None or isinstance(chosen, keras.Layer):
        chosen = (chosen or model).trainable_variables
    own = {id(v) for v in chosen}
    others = [v for v in model.variables if id(v) not in own]
    optimizer: Any = keras.optimizers.get(objective.optimizer)
    optimizer.build(chosen)

    def loss_of(values, rest, batch):
        mapping = [*zip(chosen, values), *zip(others, rest)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            result = objective.loss_fn(model, batch, True)
            losses, named = result if isinstance(result, tuple) else (result, {})
            total = keras.ops.mean(losses) + sum(keras.ops.sum(loss) for loss in model.losses)
            rest = [scope.get_current_value(v) for v in others]
        named = {name: keras.ops.mean(value) for name, value in named.items()}
        return total, (rest, named)

    @jax.jit
    def stepped(values, rest, slots, batch):
        found, grads = jax.value_and_grad(loss_of, has_aux=True)(values, rest, batch)
        total, (rest, named) = found
        values, slots = optimizer.stateless_apply(slots, grads, values)
        return values, rest, slots, total, named

    def step(batch):
        groups = (chosen, others, optimizer.variables)
        *new, total, named = stepped(*([v.value for v in group] for group in groups), batch)
        for group, values in zip(groups, new):
            for variable, value in zip(group, values):
                variable.assign(value)
        return total, named

    return step


def main(names: list[str]) -> None:
    """Prints the results of some scripts, or of all that can run."""
    tftpu.connect("none", virtual_devices=4)  # JAX keeps the number of devices it begins with
    for name in names or [n for n in running.names() if n not in NOT_ON_JAX]:
        try:
            found: Any = compare(running.load(name))._asdict()
        except Exception as error:  # a script's failure is a result, and the others go their way
            traceback.print_exc(limit=-3)
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **found}), flush=True)
        keras.backend.clear_session()
        jax.clear_caches()


if __name__ == "__main__":
    np.seterr(all="ignore")
    main(sys.argv[1:])
