"""The weights of a model alone, for other programs."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.storage import files, safetensors


def write_weights(model: keras.Model, averages: list, path: str) -> None:
    """Writes the weights and the moving statistics of a model.

    Args:
        model: built.
        averages: of its trainable variables, to be written in their place; empty: none are.
        path: local or `gs://`; ends in `.weights.h5` or `.safetensors`.

    Raises:
        UserError: another ending.
    """
    if str(path).endswith(".safetensors"):
        values = {id(v): a for v, a in zip(model.trainable_variables, averages)}
        arrays = {
            v.path: np.ascontiguousarray(tf.convert_to_tensor(values.get(id(v), v)))
            for v in model.weights
        }
        files.write_whole(path, safetensors.TensorFile(arrays))
    elif str(path).endswith(".weights.h5"):
        _write_h5(model, averages, path)
    else:
        raise UserError(f"{path} must end in .weights.h5 or .safetensors.")


def _write_h5(model: keras.Model, averages: list, path: str) -> None:
    """Keras writes the model as it is, to a disk: the averages are put in, and out again."""
    trained = [np.array(v.numpy()) for v in model.trainable_variables] if averages else []
    try:
        for variable, average in zip(model.trainable_variables, averages):
            variable.assign(average.numpy())
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "model.weights.h5")
            model.save_weights(local)
            files.write_whole(path, files.read(local))
    finally:
        for variable, value in zip(model.trainable_variables, trained):
            variable.assign(value)
