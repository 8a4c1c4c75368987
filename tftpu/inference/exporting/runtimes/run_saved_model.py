"""Runs a SavedModel on TensorFlow alone: `python run_saved_model.py MODEL INPUTS.npz OUTPUTS.npz`.

The arrays of call number N are named N/INPUT in INPUTS and N/OUTPUT in OUTPUTS. A call runs the
signature that has the same input names.
"""

import sys

import numpy as np
import tensorflow as tf

path, given, to = sys.argv[1:]
model = tf.saved_model.load(path)
by_inputs = {frozenset(run.structured_input_signature[1]): run for run in model.signatures.values()}
calls = {}
for key, value in np.load(given).items():
    number, _, name = key.partition("/")
    calls.setdefault(number, {})[name] = tf.constant(value)
outputs = {}
for number, inputs in calls.items():
    for name, value in by_inputs[frozenset(inputs)](**inputs).items():
        array = value.numpy()
        outputs[f"{number}/{name}"] = array.astype(str) if array.dtype == object else array
assert "tftpu" not in sys.modules
np.savez(to, **outputs)
