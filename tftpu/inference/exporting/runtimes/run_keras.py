"""Runs a `.keras` file on Keras: `python run_keras.py MODEL INPUTS.npz OUTPUTS.npz MODULE...`.

The arrays of INPUTS are named N/INPUT, for the Nth call; those of OUTPUTS likewise. The modules are
those that define the model's layers.
"""

import importlib
import sys
from typing import Any

import keras
import numpy as np

path, given, to, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
model: Any = keras.models.load_model(path)
outputs = {}
for key, value in np.load(given).items():
    outputs[f"{key.partition('/')[0]}/logits"] = np.asarray(model(value, training=False))
np.savez(to, **outputs)
