"""Trains a script's model under plain Keras or TensorFlow and under `Trainer`; compares the two."""

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tftpu
from tests.compatibility.data import BATCH, STEPS
from tftpu import Objective
from tftpu.preflight import PreflightOptions, check
from tftpu.preflight.slice_report import SliceReport

FOLDER = Path(__file__).parent / "scripts"
TOLERANCE = 1e-5

# Why a script differs, in the words of the table.
BATCH_STATISTICS = (
    "Keras's `BatchNormalization` takes its statistics over the examples of one device. "
    "`GhostBatchNormalization` and `GroupNormalization` do not depend on the number of devices."
)
SPARSE_GRADIENTS = (
    "Compared with dense gradients: Keras squares the sparse gradient of an embedding before it "
    "merges tokens that occur twice."
)


@dataclasses.dataclass(frozen=True)
class Script:
    """A model with its data and its training logic.

    Attributes:
        model: returns the compiled model.
        data: arrays of `EXAMPLES` examples, nested as the batches are; or the batches themselves.
        loss_fn: as for `tftpu.Trainer`.
        objectives: returns the objectives of a model.
        sparse: whether an embedding is trained by an optimizer that squares gradients, so that
            the comparison is with dense ones.
        differs: why four devices compute other numbers; "": they do not.
        preflight: whether the step is compiled for a TPU as well.
    """

    model: Callable[[], keras.Model]
    data: Any
    loss_fn: Callable[..., Any] | None = None
    objectives: Callable[[Any], Sequence[Objective]] | None = None
    sparse: bool = False
    differs: str = ""
    preflight: bool = False

    def built(self) -> keras.Model:
        """Returns the model with the same initial weights every time."""
        keras.utils.set_random_seed(1)
        return self.model()

    def batches(self) -> tf.data.Dataset:
        """Returns the batches of all steps."""
        if isinstance(self.data, tf.data.Dataset):
            return self.data
        return tf.data.Dataset.from_tensor_slices(self.data).batch(BATCH, drop_remainder=True)

    def objectives_of(self, model: keras.Model) -> Sequence[Objective]:
        """Returns the objectives of a model; none if it is compiled with its loss."""
        if self.objectives:
            return self.objectives(model)
        return [Objective(self.loss_fn, None, model.optimizer)] if self.loss_fn else []

    @property
    def way(self) -> str:
        """The way in which the training logic reaches the trainer."""
        if self.objectives or self.loss_fn:
            return "objectives" if self.objectives else "loss_fn"
        own = type(self.built()).compute_loss is not keras.Model.compute_loss
        return "compute_loss" if own else "fit"


class Trained(NamedTuple):
    """The outcome of a training run.

    Attributes:
        before, weights: all weights of the model, one after the other, at first and at last.
        history: the value of every step, by name; not a number where it was not computed.
    """

    before: np.ndarray
    weights: np.ndarray
    history: dict[str, list[float]]


class Differences(NamedTuple):
    """How far `Trainer` is from Keras, and how far training went.

    Attributes:
        one, four: the difference on one and on four devices; not a number where not computed.
        trained: the change of the weights by training.
    """

    one: float
    four: float
    trained: float


def compare(script: Script) -> Differences:
    """Trains under Keras, on one device and on four; returns the differences."""
    # Eight steps of a small model are over before it pays to optimize its graph.
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        expected = by_keras(script)
        one = difference(by_trainer(script, 1), expected)
        four = difference(by_trainer(script, 4), expected)
    finally:
        before.setdefault("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options(before)
    return Differences(one, four, relative(expected.weights, expected.before))


def names() -> list[str]:
    """Returns the names of the scripts."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def load(name: str) -> Script:
    """Returns the script of a name."""
    return importlib.import_module(f"tests.compatibility.scripts.{name}").SCRIPT


def title(name: str) -> str:
    """Returns the first line of a script's docstring."""
    module = importlib.import_module(f"tests.compatibility.scripts.{name}")
    return (module.__doc__ or "").strip().partition("\n")[0]


def by_keras(script: Script) -> Trained:
    """Trains with Keras's `fit`, or where it has none of the logic, by hand in plain TensorFlow."""
    model = script.built()
    if script.loss_fn or script.objectives:
        return by_hand(model, list(script.batches()), script.objectives_of(model), _step)
    first = next(iter(script.batches()))
    x, y, weight = keras.utils.unpack_x_y_sample_weight(first)
    if computes_each_loss(model, x, y, weight):
        objectives = [Objective(computed_loss, None, model.optimizer)]
        return by_hand(model, list(script.batches()), objectives, _step)
    model.jit_compile = False  # to trace is all that eight steps need
    if not model.built:
        model(x)
    before = weights(model)
    if script.sparse:
        _train_with_dense_gradients(model.optimizer)
    history = model.fit(script.batches(), epochs=STEPS, steps_per_epoch=1, shuffle=False, verbose=0)
    return Trained(before, weights(model), history.history)


def by_trainer(script: Script, replicas: int) -> Trained:
    """Trains with `tftpu.Trainer` on virtual CPU devices."""
    engine = tftpu.connect("none", virtual_devices=replicas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what the table says as well
        with engine.scope():
            model = script.built()
            objectives = script.objectives(model) if script.objectives else ()
            trainer = tftpu.Trainer(model, loss_fn=script.loss_fn, objectives=objectives)
        before = weights(model)
        history = trainer.fit(script.batches(), steps=STEPS, eval_every=1, verbose=0)
    return Trained(before, weights(model), history.history)


def preflight(script: Script) -> SliceReport:
    """Compiles the step with the TPU compiler, for 8 examples on each core of a v5e-8."""
    spec = tf.nest.map_structure(
        lambda t: tf.TensorSpec((8 * BATCH, *t.shape[1:]), t.dtype), script.batches().element_spec
    )
    options = PreflightOptions(objectives=script.objectives_of)
    return check(script.built, spec, ["v5e-8"], options).slices[0]


def difference(actual: Trained, expected: Trained) -> float:
    """Returns the relative difference of the weights, or of what was logged if that is larger."""
    both = (actual.history.keys() & expected.history.keys()) - {"learning_rate"}
    if not any("loss" in name for name in both):
        raise ValueError(f"no loss in common: {[*actual.history]} and {[*expected.history]}")
    pairs = [(actual.weights, expected.weights)]
    pairs += [(actual.history[name], expected.history[name]) for name in sorted(both)]
    return max(relative(*pair) for pair in pairs)


def relative(actual: Any, expected: Any) -> float:
    """Returns the norm of the difference over the norm of what was expected, where that is known.

    Raises:
        ValueError: there are more values of one than of the other.
    """
    actual, expected = (np.asarray(v, np.float64) for v in (actual, expected))
    if actual.shape != expected.shape:
        raise ValueError(f"{actual.shape} values and {expected.shape}")
    there = ~np.isnan(expected)
    actual, expected = actual[there], expected[there]
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-12))


def weights(model: keras.Model) -> np.ndarray:
    """Returns all weights of a model, one after the other."""
    return np.concatenate([[], *(np.ravel(value) for value in model.get_weights())])


def by_hand(
    model: keras.Model,
    batches: Sequence[Any],
    objectives: Sequence[Objective],
    step_of: Callable[[keras.Model, Objective], Callable[[Any], Any]],
) -> Trained:
    """Trains without `fit`, on the mean of what each loss function returns.

    Args:
        model: the model.
        batches: one for each step.
        objectives: what is trained, in the order of a step.
        step_of: returns one step of an objective, which returns its loss and the values it names.
    """
    for one in objectives:
        one.loss_fn(model, batches[0], False)  # builds what is not built yet
    before = weights(model)
    steps = [step_of(model, one) for one in objectives]
    history: dict[str, list[float]] = {}
    for number, batch in enumerate(batches):
        for one, step in zip(objectives, steps):
            due = number % one.every == 0
            loss, values = step(batch) if due else (math.nan, {})
            key = "loss" if len(objectives) == 1 else f"{one.name}_loss"
            history.setdefault(key, []).append(float(loss))
            for name, value in values.items():
                history.setdefault(name, []).append(float(value))
    return Trained(before, weights(model), history)


def _step(model: keras.Model, objective: Objective) -> Callable[[Any], Any]:
    """Returns one step of an objective in plain TensorFlow."""
    variables = objective.variables
    if variables is None or isinstance(variables, keras.Layer):
        variables = (variables or model).trainable_variables
    optimizer: Any = keras.optimizers.get(objective.optimizer)
    optimizer.build(variables)

    def step(batch):
        with tf.GradientTape() as tape:
            result = objective.loss_fn(model, batch, True)
            losses, values = result if isinstance(result, tuple) else (result, {})
            loss = tf.reduce_mean(losses)
            total = tf.add_n([loss, *model.losses])
        gradients = tape.gradient(total, variables)
        optimizer.apply_gradients(zip(map(tf.convert_to_tensor, gradients), variables))
        return total, {name: tf.reduce_mean(value) for name, value in values.items()}

    return tf.function(step, autograph=False)


def computed_loss(model: Any, batch: Any, training: bool) -> Any:
    """Calls a model's own `compute_loss`, as a loss function."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    return model.compute_loss(x, y, model(x, training=training), weight, training)


def computes_each_loss(model: Any, x: Any, y: Any, weight: Any) -> bool:
    """Returns whether the model's own `compute_loss` returns one number for each example."""
    if type(model).compute_loss is keras.Model.compute_loss:
        return False
    return len(model.compute_loss(x, y, model(x), weight, True).shape) > 0


def _train_with_dense_gradients(optimizer: Any) -> None:
    apply = optimizer.apply_gradients
    optimizer.apply_gradients = lambda pairs, **options: apply(
        [(tf.convert_to_tensor(gradient), variable) for gradient, variable in pairs], **options
    )
