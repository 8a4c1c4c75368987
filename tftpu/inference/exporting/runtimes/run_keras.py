"""Runs a `.keras` file on Keras: `python run_keras.py MODEL INPUTS.npz OUTPUTS.npz`.

The arrays of INPUTS are named N/INPUT, for the Nth call; those of OUTPUTS likewise. Layers of the
zoo are known; those of a user's own have to be registered where the file is loaded.
"""

import sys

import numpy as np

from tftpu import models

path, given, to = sys.argv[1:]
model = models.load_model(path)
outputs = {}
for key, value in np.load(given).items():
    outputs[f"{key.partition('/')[0]}/logits"] = np.asarray(model(value, training=False))
np.savez(to, **outputs)
