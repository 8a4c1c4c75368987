"""Writes the adapters of a KerasHub task in PEFT's format, for its twin in Transformers.

KerasHub itself reads a task from its twin (`reading`), or writes it as its twin
(`export_to_transformers`). So the task with the adapters' products as its kernels, and zeros
elsewhere, gives what they add to each matrix there. Such a matrix is factored again: an adapter of
a kernel with heads has a matrix for each head, whose ranks add up.

Tried with KerasHub 0.32 and PEFT 0.21.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.kernels.assignment import assign
from tftpu.models import adapters
from tftpu.models.keras_hub import reading
from tftpu.models.weights import files, peft

_SMALLEST = 1e-6  # relative to the largest singular value: below are errors of rounding


def save_adapters(
    model: keras.Model,
    plain: Any,
    folder: str,
    base: str = "",
    replaced: Mapping[str, np.ndarray] | None = None,
) -> int:
    """Writes the adapters of a task.

    Args:
        model: the task with adapters.
        plain: the same task without, whose weights are overwritten.
        folder: the folder to write, local or `gs://`.
        base: the name of the twin that is adapted, for `adapter_config.json`.
        replaced: values by path that take the place of weights, such as their averages.

    Returns:
        The number of values written.

    Raises:
        UserError: KerasHub can neither read such a task from Transformers nor write it for that,
            or weights of it were trained without adapters.
    """
    whole = [v.path for v in model.trainable_variables if not v.path.endswith(adapters.ADAPTERS)]
    if whole:
        raise UserError(
            f"{whole[0]!r} was trained without adapters, and its name in Transformers is unknown: "
            "write all weights, with --merge."
        )
    for variable in plain.weights:
        assign(variable, np.zeros(variable.shape, "float32"))
    adapters.assign_added(plain, model, replaced)
    arrays, transposed = reading.find_matrices(plain), False
    if arrays is None:
        about, arrays = _export(plain)
        transposed = about["model_type"] == "gpt2"  # whose layers are Conv1D
    factors, ranks = {}, {}
    for name, matrix in arrays.items():
        if matrix.any():
            module = name.removesuffix(".weight")
            first, second = _factor(matrix.T if transposed else matrix)
            ranks[module] = len(first)
            factors[f"{module}.lora_A.weight"] = first
            factors[f"{module}.lora_B.weight"] = second
    if not ranks:
        raise UserError(f"The adapters of {model.name!r} add nothing yet: train them first.")
    config = peft.build_config(max(ranks.values()), sorted(ranks), base=base, transposed=transposed)
    config |= {"rank_pattern": ranks, "alpha_pattern": ranks}  # what they add is scaled by 1
    return peft.write(folder, factors, config)


def _export(plain: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the configuration and the weights of a task's twin in Transformers."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            plain.export_to_transformers(scratch)
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"KerasHub cannot write {type(plain).__name__} for Transformers ({error}), so PEFT "
                "has no names for its adapters: write them merged, with --merge."
            ) from error
        with open(os.path.join(scratch, "config.json")) as file:
            about = json.load(file)
        stored = files.read(os.path.join(scratch, "model.safetensors"))
        return about, {name: array.content() for name, array in stored.items()}


def _factor(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rank, in) and (out, rank), whose product in reverse is a matrix, (out, in)."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = int((values > _SMALLEST * values[0]).sum())
    root = np.sqrt(values[:rank])
    return (
        np.ascontiguousarray(root[:, None] * right[:rank], "float32"),
        np.ascontiguousarray(left[:, :rank] * root, "float32"),
    )
