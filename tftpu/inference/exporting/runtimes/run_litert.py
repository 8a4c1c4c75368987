"""Runs a LiteRT model on LiteRT: `python run_litert.py MODEL INPUTS.npz OUTPUTS.npz`.

The arrays of call number N are named N/INPUT in INPUTS and N/OUTPUT in OUTPUTS.
"""

import sys

import numpy as np
from ai_edge_litert.interpreter import Interpreter

path, given, to = sys.argv[1:]
run = Interpreter(model_path=path).get_signature_runner("serving_default")
calls = {}
for key, value in np.load(given).items():
    number, _, name = key.partition("/")
    calls.setdefault(number, {})[name] = value
outputs = {}
for number, inputs in calls.items():  # batch sizes differ: the runner resizes the inputs
    for name, array in run(**inputs).items():
        outputs[f"{number}/{name}"] = array.astype(str) if array.dtype == object else array
assert "tensorflow" not in sys.modules
np.savez(to, **outputs)
