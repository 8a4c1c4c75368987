"""Trains a backbone two steps by Keras's `fit` and by `Trainer`, and compares the two."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tftpu
from tests.support.hub import builders, inputs
from tftpu.errors import UserError

STEPS, BATCH, TOLERANCE = 2, 8, 1e-5
_FIT = {"epochs": STEPS, "steps_per_epoch": 1, "shuffle": False}  # a loss for each step
# An output that has no row for each example.
_SHARED = ("prompt_dense_positional_embeddings",)
# Where a step of `RATE` throws the weights far away, a smaller one: rounding would grow with them.
RATE = 0.1
_RATES = {
    "BLIP2Backbone": 1e-3,
    "CLIPBackbone": 1e-2,
    "DepthAnythingBackbone": 1e-4,
    "EdRecBackbone": 1e-4,
    "MetaCLIP2Backbone": 1e-2,
    "T5Gemma2Backbone": 1e-2,
}


class KerasFailedError(Exception):
    """A backbone that KerasHub does not build, or Keras's `fit` does not train."""


class Trained(NamedTuple):
    """The outcome of a training run.

    Attributes:
        losses: of each step.
        weights: all weights of the model after the last step.
    """

    losses: np.ndarray
    weights: list[np.ndarray]


class Compared(NamedTuple):
    """How far `Trainer` is from Keras's `fit`, and how far training went.

    Attributes:
        losses: the largest relative difference of a step's losses.
        weights: the norm of the weights' difference over that of their change by training.
        update: the norm of that change over the norm of the weights.
        still: the weights that training did not change, over the number of all.
        divided: the elements of weights that lie divided over devices, over the number of all.
        noise: the larger of the two differences between two runs of Keras's `fit`, one of them from
            weights that differ in their last bits; 0 where `Trainer` is within TOLERANCE.
    """

    losses: float
    weights: float
    update: float
    still: float
    divided: float = 0.0
    noise: float = 0.0

    @property
    def kind(self) -> str:
        """Is "equal", "rounding" (at most ten times the noise), or "differs"."""
        difference = max(self.losses, self.weights)
        if difference <= TOLERANCE:
            return "equal"
        # Sums over eight devices round in more places than the initial weights alone.
        return "rounding" if difference <= 10 * self.noise else "differs"


def compare(name: str, engine: Any, remat: str = "none") -> Compared:
    """Trains a backbone in both ways, from the same weights on the same batches.

    Args:
        name: of the backbone's class.
        engine: the engine that `Trainer` uses; Keras's `fit` uses one device.
        remat: what `Trainer` recomputes in the backward pass.

    Raises:
        UserError: tftpu does not train this backbone so.
        KerasFailedError: Keras does not either.
    """
    keras.utils.set_random_seed(1)
    with _failing_in_keras():
        model = build_model(name)
        before, batches = model.get_weights(), draw_batches(name, model)
    try:  # first: what tftpu refuses, Keras need not compile
        found, divided = _train_divided(name, engine, remat, before, batches)
    except UserError:
        raise
    except Exception:
        with _failing_in_keras():
            _train(model, model.fit, batches, **_FIT)
        raise
    with _failing_in_keras():
        expected = _train(model, model.fit, batches, **_FIT)
    compared = measure(found, expected, before)._replace(divided=divided)
    if compared.kind == "equal":
        return compared
    return compared._replace(noise=_measure_noise(name, batches, expected, before))


@contextlib.contextmanager
def _failing_in_keras() -> Iterator[None]:
    """Raises KerasFailedError for any error of the block."""
    try:
        yield
    except Exception as error:
        raise KerasFailedError(f"{type(error).__name__}: {error}") from error


def _train_divided(
    name: str, engine: Any, remat: str, before: list[np.ndarray], batches: Any
) -> tuple[Trained, float]:
    """Returns what `Trainer` does, and the part of the weights that devices hold in parts."""
    with engine.scope():
        model = build_model(name)
        model.set_weights(before)
    trainer = tftpu.Trainer(model, engine=engine, options=tftpu.TrainConfig(remat=remat))
    found = _train(model, trainer.fit, batches, steps=STEPS, eval_every=1)
    return found, _measure_division(model)


def _measure_division(model: Any) -> float:
    """Returns the elements of weights that devices hold in parts, over the number of all."""
    if keras.backend.backend() != "jax":
        return 0.0
    parts = [v.value.size for v in model.weights if not v.value.sharding.is_fully_replicated]
    return sum(parts) / model.count_params()


def _measure_noise(name: str, batches: Any, expected: Trained, before: list[np.ndarray]) -> float:
    """Returns how far Keras's `fit` is from itself if the last bit of each weight differs."""
    rng = np.random.default_rng(2)
    near = [np.nextafter(w, rng.choice([-np.inf, np.inf], w.shape).astype(w.dtype)) for w in before]
    model = build_model(name)
    model.set_weights(near)
    losses, weights = _train(model, model.fit, batches, **_FIT)
    weights = [w - (changed - was) for w, changed, was in zip(weights, near, before)]
    noise = measure(Trained(losses, weights), expected, before)
    return max(noise.losses, noise.weights)


def build_model(name: str) -> Any:
    """Returns a backbone, compiled with the mean square of its outputs' distance from targets.

    Inputs and outputs are dictionaries. The outputs are all of floating point that have a row for
    each example.
    """
    backbone = builders.build_backbone(name)
    given = {}
    for tensor in keras.tree.flatten(backbone.input):
        key = "images" if tensor.name.startswith("keras_tensor") else tensor.name
        given[key] = keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=key)
    found = backbone(keras.tree.pack_sequence_as(backbone.input, [*given.values()]))
    outputs = {
        "_".join(map(str, path)) or "output": tensor
        for path, tensor in keras.tree.flatten_with_path(found)
        if "float" in tensor.dtype and path != _SHARED
    }
    model: Any = keras.Model(given, outputs, name="small")
    # Two steps of TensorFlow need no compiler. Keras's own choice on JAX is to compile.
    compiler: Any = False if keras.backend.backend() == "tensorflow" else "auto"
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # MiT's has no argument
    optimizer = keras.optimizers.SGD(_RATES.get(name, RATE), momentum=0.9)
    model.compile(optimizer, dict.fromkeys(outputs, "mse"), jit_compile=compiler)
    return model


def draw_batches(name: str, model: Any) -> tf.data.Dataset:
    """Returns the batches of all steps: inputs, and targets of the outputs' shapes."""
    x = inputs.draw_inputs(name, model.input, STEPS * BATCH)
    outputs = _compute_outputs(model, {key: value[:BATCH] for key, value in x.items()})
    rng = np.random.default_rng(1)
    y = {}
    for key, output in outputs.items():
        y[key] = rng.normal(size=(STEPS * BATCH, *output.shape[1:])).astype("float32")
    arrays: Any = (x, y)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True)


def _compute_outputs(model: Any, x: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the outputs of a batch; on JAX their shapes alone, which need no compiler."""
    if keras.backend.backend() == "jax":
        import jax

        def call(x: Any) -> Any:
            with keras.StatelessScope():  # nothing that is traced stays in a variable
                return model(x, training=False)

        return jax.eval_shape(call, x)
    return model.predict_on_batch(x)


def measure(found: Trained, expected: Trained, before: list[np.ndarray]) -> Compared:
    """Returns the differences of two runs that began with the same weights."""
    start, end, ours = (
        np.concatenate([w.ravel() for w in ws]).astype("float64")
        for ws in (before, expected.weights, found.weights)
    )
    update = np.linalg.norm(end - start)
    return Compared(
        losses=float(np.max(np.abs(found.losses - expected.losses) / np.abs(expected.losses))),
        weights=float(np.linalg.norm(ours - end) / update),
        update=float(update / np.linalg.norm(start)),
        still=float(np.mean([np.array_equal(*pair) for pair in zip(before, expected.weights)])),
    )


def _train(model: Any, fit: Callable[..., Any], batches: Any, **arguments: Any) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        history = fit(batches, verbose=0, **arguments)
    return Trained(np.asarray(history.history["loss"]), model.get_weights())
