"""Runs an ONNX model on ONNX Runtime: `python run_onnx.py MODEL INPUTS.npz OUTPUTS.npz`.

The arrays of call number N are named N/INPUT in INPUTS and N/OUTPUT in OUTPUTS.
"""

import sys
from typing import Any

import numpy as np
import onnxruntime

path, given, to = sys.argv[1:]
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
calls = {}
for key, value in np.load(given).items():
    number, _, name = key.partition("/")
    calls.setdefault(number, {})[name] = value
outputs = {}
for number, inputs in calls.items():
    found: list[Any] = list(session.run(None, inputs))
    for name, array in zip(names, found):
        outputs[f"{number}/{name}"] = array.astype(str) if array.dtype == object else array
assert "tensorflow" not in sys.modules
np.savez(to, **outputs)
