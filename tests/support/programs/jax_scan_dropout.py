"""Prints, for each mode of `scan`, the outputs of two calls in training of a model with dropout.

For `tests/blocks/test_scanned.py`: KERAS_BACKEND=jax python -m
tests.support.programs.jax_scan_dropout
"""

import json

import keras
import numpy as np

from tftpu import models

TINY = {"vocabulary": 8, "context": 4, "width": 8, "heads": 2, "layers": 2, "dropout": 0.5}


def main() -> None:
    """Prints a line of JSON."""
    found = {}
    for scan in ("none", "block"):
        keras.utils.set_random_seed(0)
        model = models.build("gpt2_small", scan=scan, **TINY)
        calls = [model(np.zeros((1, 4), "int32"), training=True) for _ in range(2)]
        found[scan] = [np.asarray(call).tolist() for call in calls]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
