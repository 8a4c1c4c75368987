"""Loads weights into models on eight devices, for `tests/engines/jax/test_loading.py`.

    KERAS_BACKEND=jax python -m tests.support.hub.loading KIND FOLDER

KIND is a function of this module. Prints what it found as JSON.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tftpu

SIZES = {"num_layers": 1, "num_heads": 4, "hidden_dim": 128, "intermediate_dim": 256}
_CASES = (  # files by the dtypes of their models
    ("whole", "float32"),
    ("whole", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("divided", "float32"),
)
DIVIDED = 4096  # elements from which a variable is divided


def load_presets(folder: Path) -> dict[str, Any]:
    """Loads KerasHub's files in the scope of an engine, and a model's weights outside it."""
    engine = tftpu.connect("none", virtual_devices=8, mesh="fsdp:8")
    weights = _write_presets(folder)
    found: dict[str, Any] = {}
    kind = keras_hub.models.GPT2Backbone
    for name, dtype in _CASES:
        rounded = [w.astype("bfloat16") if name == "bfloat16" else w for w in weights]
        with _watched() as seen, engine.scope():
            model = kind.from_preset(str(folder / name), dtype=dtype)
        found[f"{name} to {dtype}"] = _compare(model, rounded, seen)
    model.save(folder / "model.keras")
    with _watched() as seen, engine.scope():
        model = keras.saving.load_model(folder / "model.keras")
    found["load_model"] = _compare(model, weights, seen)
    assigning: dict[str, Callable[[], None]] = {
        "load_weights": lambda: model.load_weights(folder / "whole" / "model.weights.h5"),
        "set_weights": lambda: model.set_weights([w + 1 for w in weights]),
    }
    for name, assign in assigning.items():
        with _watched() as seen:
            assign()
        found[name] = _compare(model, [w + (name == "set_weights") for w in weights], seen)
    return found


def load_transformers(folder: Path) -> dict[str, Any]:
    """Loads a folder of Transformers by KerasHub, plainly and in the scope of an engine."""
    engine = tftpu.connect("none", virtual_devices=8, mesh="fsdp:8")
    plain: Any = keras_hub.models.Backbone.from_preset(str(folder))
    weights = [np.asarray(v) for v in plain.weights]
    with _watched() as seen, engine.scope():
        model = keras_hub.models.Backbone.from_preset(str(folder))
    return _compare(model, weights, seen)


def assign_values(folder: Path) -> dict[str, Any]:
    """Assigns arrays that do not fit, and in a stateless scope; reads values early."""
    engine = tftpu.connect("none", virtual_devices=8, mesh="fsdp:8")
    plain = keras.Variable(np.ones((64, 128), "float32"), name="kernel")
    with engine.scope():
        layer = keras.layers.Dense(128, kernel_initializer=keras.initializers.HeNormal(seed=3))
        layer.build((None, 64))
        traced = np.asarray(jax.jit(lambda: layer.kernel.value + 0)())
        same = keras.layers.Dense(128, kernel_initializer=keras.initializers.HeNormal(seed=3))
        same.build((None, 64))
    kernel: Any = layer.kernel
    found: dict[str, Any] = {
        "errors": [_catch(v.assign, np.ones((64, 64))) for v in (plain, kernel)],
        "traced": [np.array_equal(traced, np.asarray(v)) for v in (kernel, same.kernel)],
        "drawn": float(np.std(traced)),
    }
    with keras.StatelessScope() as scope:
        kernel.assign(np.zeros((64, 128)))
    found["stateless"] = [float(np.sum(scope.get_current_value(kernel)))]
    found["stateless"].append(np.array_equal(traced, np.asarray(kernel)))
    orders = []
    for order in ((0, 1), (1, 0)):
        shared = keras.random.SeedGenerator(7)
        with engine.scope():
            initializer = keras.initializers.RandomNormal(seed=shared)
            both = [keras.Variable(initializer, shape=(64, 64)) for _ in range(2)]
            for index in order:
                np.asarray(both[index])
        orders.append([np.asarray(v).tolist() for v in both])
    found["order"] = orders[0] == orders[1] and orders[0][0] != orders[0][1]
    return found


def _write_presets(folder: Path) -> list[np.ndarray]:
    """Writes a model in KerasHub's formats; returns its weights."""
    model = keras_hub.models.GPT2Backbone(1024, max_sequence_length=64, **SIZES)
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=v.shape).astype("float32") for v in model.weights]
    model.set_weights(weights)
    model.save_to_preset(str(folder / "whole"))
    model.save_to_preset(str(folder / "divided"), max_shard_size=5e-4)  # GiB
    assert len(list((folder / "divided").glob("*.h5"))) > 1
    half = keras_hub.models.GPT2Backbone(1024, max_sequence_length=64, dtype="bfloat16", **SIZES)
    half.set_weights(weights)
    half.save_to_preset(str(folder / "bfloat16"))
    return weights


def _compare(model: Any, weights: list[np.ndarray], seen: dict[str, Any]) -> dict[str, Any]:
    """Returns whether a model has these weights, in its own dtype, and what was seen meanwhile."""
    pairs = [(np.asarray(v), w) for v, w in zip(model.weights, weights, strict=True)]
    return {
        "equal": all(np.array_equal(v, w.astype(v.dtype)) for v, w in pairs),
        "divided": sum(not v.value.is_fully_replicated for v in model.weights),
        **seen,
    }


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Counts the random tensors drawn, and finds arrays that a device has as a whole.

    They are looked for before each new value of a variable is put in its place.
    """
    variables: Any = keras.Variable
    own, there = variables._direct_assign, jax.live_arrays()
    known = {id(array) for array in there}
    seen: dict[str, Any] = {"whole": [], "assigned": 0, "drawn": 0}
    drawing = {name: getattr(tf.random, name) for name in _DRAWING}

    def direct_assign(variable: Any, value: Any) -> None:
        seen["assigned"] += 1
        for array in jax.live_arrays():
            if id(array) in known or array.shape != variable.shape or array.size < DIVIDED:
                continue
            shards = [shard.data.shape for shard in array.addressable_shards]
            seen["whole"] += [variable.path for shape in shards if shape == array.shape]
        own(variable, value)

    def count(draw: Any) -> Any:
        def drawn(*arguments: Any, **options: Any) -> Any:
            seen["drawn"] += 1
            return draw(*arguments, **options)

        return drawn

    variables._direct_assign = direct_assign
    for name, draw in drawing.items():
        setattr(tf.random, name, count(draw))
    try:
        yield seen
    finally:
        variables._direct_assign = own
        for name, draw in drawing.items():
            setattr(tf.random, name, draw)


_DRAWING = ("stateless_normal", "stateless_truncated_normal", "stateless_uniform")


def _catch(function: Callable[..., Any], *arguments: Any) -> list[str]:
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error).partition("Target variable")[0]]
    return []


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
