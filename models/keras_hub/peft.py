"""Writes the adapters of a KerasHub task in PEFT's format, for its twin in Transformers.

The twin is the same model in Transformers. KerasHub reads a task from it (`reading`), or writes it
(`export_to_transformers`). Converting a task whose kernels are the products of their adapters, and
whose other weights are zero, gives the matrices that adapters add to the twin's. These are factored
again, because their rank may be higher: the first adapter of a kernel with heads has a
matrix for each head, and their ranks add up.

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

_SMALLEST = 1e-6  # relative to the largest singular value; smaller ones are rounding errors


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
        plain: the same task without adapters, whose weights are overwritten.
        folder: the folder to write, local or `gs://`.
        base: the name of the twin, for `adapter_config.json`; "" if it is unknown.
        replaced: values to use instead of the weights, such as their moving averages, by path.

    Returns:
        The number of values written.

    Raises:
        UserError: KerasHub can neither read such a task from Transformers nor write it for
            Transformers, weights besides adapters were trained, or adapters are still zero.
    """
    whole = [v.path for v in model.trainable_variables if not v.path.endswith(adapters.ADAPTERS)]
    if whole:
        raise UserError(
            f"{whole[0]!r} was trained without adapters, and its name in Transformers is unknown: "
            "write all weights merged, with --merge."
        )
    for variable in plain.weights:
        assign(variable, np.zeros(variable.shape, "float32"))
    adapters.assign_added(plain, model, replaced)
    arrays, transposed = reading.find_matrices(plain), False
    if arrays is None:
        about, arrays = _export(plain)
        transposed = about["model_type"] == "gpt2"  # GPT-2's Conv1D kernels are (in, out)
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
    config |= {"rank_pattern": ranks, "alpha_pattern": ranks}  # alpha / rank, the scale, is 1
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
    """Factors a matrix, (out, in), into two, (rank, in) and (out, rank); returns them."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = int((values > _SMALLEST * values[0]).sum())
    root = np.sqrt(values[:rank])
    return (
        np.ascontiguousarray(root[:, None] * right[:rank], "float32"),
        np.ascontiguousarray(left[:, :rank] * root, "float32"),
    )
