"""Runs a model on Keras: `python run_keras.py MODEL INPUTS.npz OUTPUTS.npz MODULE...`.

MODEL is a `.keras` file, or the folder of a preset of KerasHub.

The arrays of call number N are named N/INPUT in INPUTS and N/OUTPUT in OUTPUTS. The
modules are the ones that define the model's layers.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

path, given, to, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
model: Any
if os.path.isdir(path):
    hub = importlib.import_module("keras_hub")
    about = os.path.join(path, "task.json")
    with open(about if os.path.exists(about) else os.path.join(path, "config.json")) as file:
        model = getattr(hub.models, json.load(file)["class_name"]).from_preset(path)
else:
    model = keras.models.load_model(path)
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
