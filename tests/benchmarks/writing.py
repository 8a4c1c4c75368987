"""Times a token that a language model writes: with a cache, and by a pass over the whole row.

    python -m tests.benchmarks.writing [--turns=7] [--tokens=100]

The model is that of the config python_gpt, with random weights. Both ways are one compiled loop,
and the third runs a compiled pass for each token from Python; they take turns. Prints medians.

Evidence: executed, on this machine's CPU.
"""

import argparse
import functools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from tftpu import models
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling
from tftpu.inference.writer import Writer
from tftpu.launch.settings.config_flags import load

PROMPT = list(b"def ")


def main() -> None:
    """Prints the milliseconds a token of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    model: Any = models.build(load("python_gpt", []).model)
    tokens = keras.Input((model.hyperparameters.context,), dtype="int32")
    whole = keras.Model(tokens, _Layer(model)(tokens))  # which hides what a cache needs
    ways = {
        "a cache": functools.partial(_written, Writer(model), given.tokens),
        "the whole row, one loop": functools.partial(_written, Writer(whole), given.tokens),
        "the whole row, a call for each token": functools.partial(_called, whole, given.tokens),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.turns + 1):  # the first compiles
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                spent[name].append((time.perf_counter() - start) / given.tokens)
    for name, seconds in spent.items():
        print(f"{name:40}{1e3 * statistics.median(seconds):8.3f} ms a token")


class _Layer(keras.layers.Layer):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def call(self, tokens: Any) -> Any:
        return self.model(tokens)


def _written(writer: Writer, tokens: int) -> None:
    parts = writer.write([Row(PROMPT, tokens, Sampling())])
    assert sum(len(part) for [part] in parts) == tokens


def _called(model: keras.Model, tokens: int) -> None:
    row = np.zeros((1, model.inputs[0].shape[1]), np.int32)
    for _ in range(tokens):
        model.predict_on_batch(row)


if __name__ == "__main__":
    main()
