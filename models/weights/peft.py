"""Writes adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

PEFT names the adapters of a layer after the layer's module in Transformers, and stores them as
(rank, in) and (out, rank): https://huggingface.co/docs/peft/developer_guides/checkpoint.
Transformers splits some matrices of `tftpu.models`, such as those for queries, keys and values:
each of the resulting matrices gets the whole first adapter and its columns of the second.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.models import adapters, sizes
from tftpu.models.blocks.block_model import BlockModel
from tftpu.models.weights import files
from tftpu.models.weights.layouts import hugging_face
from tftpu.models.weights.layouts.entry import Entry
from tftpu.storage import files as storage

_PREFIX = "base_model.model."


def save_adapters(
    model: keras.Model,
    folder: str,
    base: str = "",
    replaced: Mapping[str, np.ndarray] | None = None,
) -> int:
    """Writes the adapters of a model, and its other trained weights.

    Args:
        model: the model of the zoo, with adapters.
        folder: the folder to write, local or `gs://`.
        base: the name of the base model in Transformers, for `adapter_config.json`; "" if unknown.
        replaced: values to use instead of the weights, such as their moving averages, by path.

    Returns:
        The number of values written.

    Raises:
        UserError: the model has no adapters, Transformers has no such model, or a convolution is
            adapted.
    """
    config = model.hyperparameters if isinstance(model, BlockModel) else None
    entries = hugging_face.build_layout(config) if config is not None else None
    layers = adapters.list_adapted(model)
    if not layers:
        raise UserError(
            f"The model {model.name!r} has no adapters: all of its weights were trained."
        )
    if entries is None:
        raise UserError(
            f"Transformers has no model like {model.name!r}, so PEFT has no names for its "
            "adapters: write the adapters and the weights that they adapt into one file, with "
            "--merge."
        )
    by_path = {entry.ours: entry for entry in entries}
    values = {v.path: np.asarray(keras.ops.convert_to_numpy(v)) for v in model.weights}
    values |= dict(replaced or {})
    arrays: dict[str, np.ndarray] = {}
    for layer in layers:
        arrays |= _convert_layer(layer, by_path, values)
    whole = [v.path for v in model.trainable_variables if not v.path.endswith(adapters.ADAPTERS)]
    for path in whole:
        entry = by_path[path]
        assert entry.write is not None
        arrays |= dict(zip(entry.theirs, entry.write(values[path])))
    modules = sorted({name.rpartition(".lora_")[0] for name in arrays if ".lora_" in name})
    trained = sorted({name.rpartition(".")[0] for path in whole for name in by_path[path].theirs})
    rank, alpha = layers[0].lora_rank, layers[0].lora_alpha
    transposed = isinstance(config, sizes.GPT)
    about = build_config(rank, modules, trained, base=base, transposed=transposed, alpha=alpha)
    return write(folder, arrays, about)


def write(folder: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> int:
    """Writes the files of PEFT; returns the number of values written.

    Args:
        folder: the folder to write, local or `gs://`.
        arrays: adapters and other trained weights by name, without PEFT's "base_model.model.".
        about: the content of `adapter_config.json`.
    """
    named = {f"{_PREFIX}{name}": array for name, array in arrays.items()}
    files.write_safetensors(storage.join(folder, "adapter_model.safetensors"), named)
    text = json.dumps(about, indent=2) + "\n"
    storage.write_whole(storage.join(folder, "adapter_config.json"), text.encode())
    return sum(array.size for array in arrays.values())


def _convert_layer(
    layer: Any, by_path: Mapping[str, Entry], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the adapters of a layer by PEFT's names without "base_model.model."."""
    first, second = (values[f"{layer.path}/{name}"] for name in adapters.ADAPTERS)
    if first.ndim != 2:
        raise UserError(
            f"{layer.path!r} is a {type(layer).__name__}, but PEFT reads only adapters of dense "
            "layers: write merged weights, with --merge."
        )
    theirs = by_path[f"{layer.path}/kernel"].theirs
    found = {}
    for name, columns in zip(theirs, np.split(second, len(theirs), axis=-1)):
        module = hugging_face.to_current_name(name).removesuffix(".weight")
        found[f"{module}.lora_A.weight"] = np.ascontiguousarray(first.T)
        found[f"{module}.lora_B.weight"] = np.ascontiguousarray(columns.T)
    return found


def build_config(
    rank: int,
    modules: Sequence[str],
    trained: Sequence[str] = (),
    *,
    base: str = "",
    transposed: bool = False,
    alpha: float | None = None,
) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`.

    Args:
        rank: the rank of the adapters.
        modules, trained: the names of the adapted modules, and of those that are trained in full.
        base: the name of the base model in Transformers; "" if it is unknown.
        transposed: whether the adapted modules are Conv1D, whose kernels are (in, out).
        alpha: `lora_alpha`; PEFT scales adapters by alpha / rank. None stands for the rank.
    """
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": list(modules),
        "modules_to_save": list(trained) or None,
        "inference_mode": True,
    }
