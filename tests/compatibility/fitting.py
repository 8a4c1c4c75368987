"""Calls `fit` of Keras and of `Trainer` with the same arguments, and compares all that they say.

    KERAS_BACKEND=jax python -m tests.compatibility.fitting DEVICES

prints a line of JSON for each script: its name, and its difference or an error.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tftpu
from tests.support import warm

MODULES = ("own_steps", "gradient_tapes", "compiled")


@dataclasses.dataclass(frozen=True)
class Fit:
    """A script that trains with `fit`.

    Attributes:
        model: builds the compiled model.
        arguments: returns the arguments of `fit`, with new generators and callbacks.
        one_device: whether the TensorFlow engine runs it on one device only, and says so.
        on_jax: whether it runs under Keras's JAX backend.
    """

    model: Callable[[], keras.Model]
    arguments: Callable[[], dict[str, Any]]
    one_device: bool = False
    on_jax: bool = True


def dense(units: int, activation: str | None = None) -> keras.Layer:
    """Returns a dense layer whose initial weights are always the same."""
    initializer = keras.initializers.RandomNormal(stddev=0.3, seed=units)
    return keras.layers.Dense(units, activation, kernel_initializer=initializer)


def build_compiled(kind: Callable[[], Any], **arguments: Any) -> Callable[[], Any]:
    """Returns a function that builds a model and compiles it with Adam and these arguments."""

    def build() -> Any:
        model = kind()
        model.compile(keras.optimizers.Adam(0.01), **arguments)
        return model

    return build


def load() -> dict[str, Fit]:
    """Returns the scripts of this backend by name."""
    found: dict[str, Fit] = {}
    for name in MODULES:
        found |= importlib.import_module(f"tests.compatibility.fits.{name}").FITS
    on_jax = keras.backend.backend() == "jax"
    return {name: script for name, script in found.items() if script.on_jax or not on_jax}


def compare(script: Fit, engine: Any) -> float:
    """Returns the largest difference of history, weights, and of what callbacks saw."""
    with _initial_weights():
        theirs = script.model()
        expected = _train(theirs, theirs.fit, script)
    with engine.scope():
        ours = script.model()
        trainer = tftpu.Trainer(ours, engine=engine)
    return _measure(_train(ours, trainer.fit, script), expected, "")


def _initial_weights() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which weights are those that an engine's scope gives."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    from tftpu.engines.jax.placement import initial

    return initial.as_tensorflow()


def _train(model: Any, fit: Callable[..., Any], script: Fit) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    arguments = script.arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        history = fit(**arguments, verbose=0)
    callbacks = arguments.get("callbacks", ())
    return {
        "history": history.history,
        "epochs": history.epoch,
        "seen": [getattr(callback, "seen", []) for callback in callbacks],
        "weights": [np.asarray(w) for w in model.get_weights()],
    }


def _measure(found: Any, expected: Any, where: str) -> float:
    """Returns the largest difference between two nests of numbers of the same structure."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise ValueError(f"{where}: {[*found]}, expected {[*expected]}")
        return max((_measure(found[k], expected[k], f"{where}/{k}") for k in expected), default=0.0)
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise ValueError(f"{where}: {len(found)} items, expected {len(expected)}")
        pairs = enumerate(zip(found, expected))
        return max((_measure(*pair, f"{where}/{i}") for i, pair in pairs), default=0.0)
    if isinstance(expected, str):
        return 0.0 if found == expected else float("inf")
    apart = np.linalg.norm(np.asarray(found, float) - np.asarray(expected, float))
    return float(apart / max(np.linalg.norm(expected), 1e-3))


def run(backend: str, devices: int) -> str:
    """Returns what this module prints, run by another process."""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    command = [sys.executable, "-m", "tests.compatibility.fitting", str(devices)]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(devices: int) -> None:
    """Prints the results of all scripts."""
    engine = tftpu.connect("none", virtual_devices=devices)
    for name, script in load().items():
        try:
            found: Any = {"difference": compare(script, engine)}
        except Exception as error:  # a script's failure is a result
            found = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
