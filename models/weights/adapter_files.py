"""Writes and reads adapters and the weights that are trained with them, such as a classifier's.

The arrays of the file are numbered and named by the paths of their variables:
"00003 transformer_layer_0/self_attention/query/lora_kernel_a".
"""

import re

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.kernels.assignment import assign
from tftpu.models import adapters
from tftpu.models.weights import files


def save_adapters(model: keras.Model, path: str) -> int:
    """Writes the adapters of any Keras model, and its other trained weights, to one file.

    Args:
        model: adapted by `tftpu.models.enable_lora`, or by KerasHub's `backbone.enable_lora`.
        path: the path of the file, local or `gs://`; ends in `.safetensors`.

    Returns:
        The number of values written.

    Raises:
        UserError: the model has no adapters, or the path has another ending or cannot be written.

    Example:
        >>> tftpu.models.save_adapters(model, "adapters.safetensors")
    """
    variables = _list_trained(model, "write")
    if not str(path).endswith(".safetensors"):
        raise UserError(f"{path} must end in .safetensors.")
    values = [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]
    names = [f"{number:05d} {v.path}" for number, v in enumerate(variables)]
    try:
        files.write_safetensors(path, dict(zip(names, values)))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be written ({reason}): choose another place.") from error
    return sum(value.size for value in values)


def load_adapters(model: keras.Model, path: str) -> None:
    """Loads a file of `save_adapters` into a model with the same base weights.

    Args:
        model: built and adapted like the model that was saved: the same preset, the same call of
            `enable_lora`. The numbers in automatic names, such as "dense_1", may differ.
        path: the path of the file, local or `gs://`.

    Raises:
        UserError: there is no such file, the model has no adapters, or the file holds adapters of
            another model; then nothing is loaded.

    Example:
        >>> tftpu.models.enable_lora(model, 8)
        >>> tftpu.models.load_adapters(model, "adapters.safetensors")
    """
    variables = _list_trained(model, "load into")
    arrays = files.read(path)
    here = [(_strip_counters(v.path), tuple(v.shape)) for v in variables]
    there = [
        (_strip_counters(re.sub(r"^\d+ ", "", name)), array.shape) for name, array in arrays.items()
    ]
    if here != there:
        differing = [f"{a} in the model, {b} in the file" for a, b in zip(here, there) if a != b]
        first = differing[0] if differing else f"{len(here)} arrays, but {len(there)} in the file"
        advice = "Build the model, and call enable_lora, as before save_adapters wrote the file."
        if any(".lora_A." in name for name in arrays):
            advice = "It is in PEFT's format: give model.safetensors of a run's checkpoint instead."
        raise UserError(
            f"Nothing was loaded from {path!r}, which does not hold the adapters of the model "
            f"{model.name!r}: {first}. {advice}"
        )
    for variable, array in zip(variables, arrays.values()):
        assign(variable, array.content())


def _list_trained(model: keras.Model, verb: str) -> list[keras.Variable]:
    """Returns the trained weights of a model with adapters, in the order of its weights."""
    if not adapters.list_adapted(model):
        raise UserError(
            f"The model {model.name!r} has no adapters to {verb}: call "
            "tftpu.models.enable_lora(model, 8) first."
        )
    return [v for v in model.weights if v.trainable or v.path.endswith(adapters.ADAPTERS)]


def _strip_counters(path: str) -> str:
    """Returns a path without the numbers by which Keras distinguishes layers of the same kind."""
    return re.sub(r"_\d+(?=/|$)", "", path)
