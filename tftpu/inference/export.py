"""Export of a model's weights for other programs."""

import collections
import os
import tempfile
from collections.abc import Mapping

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.storage import files, safetensors


def write_weights(model: keras.Model, averages: Mapping[str, np.ndarray], path: str) -> None:
    """Writes the weights and the moving statistics of a model.

    Args:
        model: the built model.
        averages: the values to write instead of the current ones, by the path of the weight. A
            weight without an entry is written as it is.
        path: a path, local or `gs://`, that ends in `.weights.h5` or `.safetensors`.

    Raises:
        UserError: the path has another ending or cannot be written, the model has adapters,
            or several weights have the same path, which is their name in `.safetensors`.
    """
    if any(v.path.rpartition("/")[2].startswith("lora_") for v in model.weights):
        raise UserError(
            f"The model has adapters, which neither Keras nor tftpu.models can read from {path}. "
            f"{_name_ways(model)}"
        )
    try:
        _write(model, averages, path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be written ({reason}): choose another place.") from error


def _name_ways(model: keras.Model) -> str:
    """Returns advice on how to write adapters, alone or merged into the weights."""
    if hasattr(model, "save_to_preset"):
        merged = "model.save_to_preset(folder) or model.save('name.keras')"
    else:
        merged = (
            "model.save('name.keras'), or for a model of the zoo tftpu.models.save_weights(model, "
            "path) or `tftpu export-weights --merge`"
        )
    return (
        "To write them alone, use tftpu.models.save_adapters(model, 'name.safetensors'). To merge "
        f"them into the weights, use {merged}."
    )


def check_unique_paths(model: keras.Model) -> None:
    """Raises `UserError` if weights of a model share a path, which is their name in the file."""
    for path, count in collections.Counter(v.path for v in model.weights).items():
        if count > 1:
            raise UserError(
                f"Several weights of {model.name!r} are called {path!r}, so they cannot be written "
                "by their names. model.save('name.keras') writes them, and `tftpu export-weights "
                "--adapters` the adapters, unless they have averages (ema_momentum)."
            )


def _write(model: keras.Model, averages: Mapping[str, np.ndarray], path: str) -> None:
    if str(path).endswith(".safetensors"):
        check_unique_paths(model)
        arrays = {
            v.path: np.ascontiguousarray(averages.get(v.path, keras.ops.convert_to_numpy(v)))
            for v in model.weights
        }
        files.write_whole(path, safetensors.TensorFile(arrays))
    elif str(path).endswith(".weights.h5"):
        _write_h5(model, averages, path)
    else:
        raise UserError(f"{path} must end in .weights.h5 or .safetensors.")


def _write_h5(model: keras.Model, averages: Mapping[str, np.ndarray], path: str) -> None:
    """Writes an HDF5 file with Keras.

    Keras can write only the current weights, so the averages replace them temporarily.
    """
    replaced = [v for v in model.trainable_variables if v.path in averages]
    trained = [np.array(keras.ops.convert_to_numpy(v)) for v in replaced]
    try:
        for variable in replaced:
            variable.assign(averages[variable.path])
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "model.weights.h5")
            model.save_weights(local)
            files.write_whole(path, files.read(local))
    finally:
        for variable, value in zip(replaced, trained):
            variable.assign(value)
