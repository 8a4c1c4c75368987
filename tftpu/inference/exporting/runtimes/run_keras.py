"""Runs a `.keras` file on Keras: `python run_keras.py MODEL INPUTS.npz OUTPUTS.npz MODULE...`.

The arrays of INPUTS are named N/INPUT, for the Nth call; those of OUTPUTS have the same form. The
modules are those that define the model's layers.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

path, given, to, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
model: Any = keras.models.load_model(path)
calls: dict[str, dict[str, Any]] = {}
for key, value in np.load(given).items():
    number, _, name = key.partition("/")
    calls.setdefault(number, {})[name] = value
outputs = {}
for number, inputs in calls.items():
    specs = model.input
    packed = inputs
    if not isinstance(specs, Mapping):
        packed = keras.tree.pack_sequence_as(specs, list(inputs.values()))
    found = model(packed, training=False)
    if isinstance(found, list | tuple):
        found = {f"output_{place}": value for place, value in enumerate(found)}
    elif not isinstance(found, Mapping):
        found = {"logits": found}
    outputs |= {f"{number}/{name}": np.asarray(value) for name, value in found.items()}
np.savez(to, **outputs)
