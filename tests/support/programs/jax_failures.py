"""Provokes failures of models on the JAX engine, for `tests/launch/test_failures.py`.

KERAS_BACKEND=jax python -m tests.support.programs.jax_failures > MESSAGES.json
"""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tftpu


class Calling(keras.Model):
    """A model of one layer, and of a function of its output.

    Args:
        function: takes the model and the output of the layer.
    """

    def __init__(self, function: Callable[["Calling", Any], Any]):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.function = function
        self.kept: list[Any] = []

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, inputs):
        return self.function(self, self.dense(inputs))


def branch(model: Calling, x: Any) -> Any:
    """Asks for the value of a tensor."""
    return x if keras.ops.sum(x) > 0 else -x


def through_numpy(model: Calling, x: Any) -> Any:
    """Calls NumPy on a tensor."""
    return x * np.tanh(np.asarray(x))


def masked(model: Calling, x: Any) -> Any:
    """Selects the elements that a mask allows."""
    return x * keras.ops.sum(x[x > 0])


def keeping(model: Calling, x: Any) -> Any:
    """Uses a tensor that an earlier call kept."""
    model.kept.append(x)
    return x + model.kept[0]


def message(function: Callable[..., Any], **cluster: Any) -> str:
    """Returns the message with which a run of a model ends."""
    engine = tftpu.connect("none", 1, engine="jax", **cluster)
    with engine.scope():
        model = Calling(function)
        model.compile("sgd", "mse")
    x = np.ones((4, 3), "float32")
    try:
        tftpu.Trainer(model).fit(x, x[:, :2], batch_size=4, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit(f"{function.__name__} did not fail")


def main() -> None:
    """Prints the messages by name."""
    options = {"compiler_options": "xla_tpu_scoped_vmem_limit_kib=1024"}
    found = {function.__name__: message(function) for function in (branch, through_numpy, masked)}
    found["keeping"] = message(keeping)
    found["options"] = message(lambda model, x: x, **options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
