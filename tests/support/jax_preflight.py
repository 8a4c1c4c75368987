"""Checks a model on the JAX engine for slices, for `tests/preflight/test_jax_steps.py`.

KERAS_BACKEND=jax python -m tests.support.jax_preflight MESH SLICE,... > REPORT.json
"""

import sys

import keras
import tensorflow as tf

from tftpu import preflight
from tftpu.config import TrainOptions

INPUTS, HIDDEN, CLASSES, BATCH = 1024, 4096, 16, 4096


def model() -> keras.Model:
    """Returns a compiled model of two layers."""
    built = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, "relu", name="hidden"),
            keras.layers.Dense(CLASSES, dtype="float32", name="head"),
        ],
        name="mlp",
    )
    built.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def main(mesh: str, slices: str) -> None:
    """Prints the report as JSON."""
    batch = tf.TensorSpec((BATCH, INPUTS)), tf.TensorSpec((BATCH,), tf.int32)
    train = TrainOptions(gradient_accumulation_steps=2, global_clipnorm=1.0)
    options = preflight.PreflightOptions(train=train, engine="jax", mesh=mesh)
    print(preflight.check(model, batch, slices.split(","), options).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
