"""A task's kernels as the matrices of its twin in Transformers, by the way KerasHub reads them.

KerasHub's reader of a family asks a loader for each variable, with the name of the twin's tensor
and a function of that tensor. Such a function only moves numbers, so what it does to their places
says where each number of a kernel belongs in the twin.

Tried with KerasHub 0.32.
"""

import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tftpu import layer_internals as internals
from tftpu.errors import UserError

_FOLDER = "keras_hub.src.utils.transformers"
_ROUTERS = ("gate", "router")  # of tokens to experts: modules of Transformers that PEFT leaves out
_BASE = 1024
_Read = tuple[str, Callable[[np.ndarray, list[int]], np.ndarray] | None]


def find_matrices(task: Any) -> dict[str, np.ndarray] | None:
    """Returns the kernels of a causal language model that are not zero.

    Returns:
        By the name of the twin's tensor, (out, in); None if KerasHub has no reader for the family,
        or one that needs more of the twin than names.

    Raises:
        UserError: the twin has no such model, or a kernel is in no layer that PEFT adapts.
    """
    reader = _find_reader(type(task.backbone))
    read = _record(reader, task) if reader and task.backbone is not task else {}
    if not read:
        return None
    found = {}
    for layer in internals.flatten_layers(task):
        if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
            kernel = np.asarray(keras.ops.convert_to_numpy(layer.kernel))
            if kernel.any():
                name, move = _locate(read, layer.kernel)
                found[name] = _arrange(layer, kernel, move)
    return found


def _find_reader(kind: type) -> Any:
    """Returns KerasHub's module that reads a backbone from Transformers, or None."""
    for one in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__):
        if one.name.startswith("convert_"):
            module = importlib.import_module(f"{_FOLDER}.{one.name}")
            if getattr(module, "backbone_cls", None) is kind:
                return module
    return None


class _MissingTensorError(Exception):
    """The name of a tensor that a reader wants to see."""


class _Recorder:
    """A loader that records what is asked for, and has no tensors.

    Attributes:
        read: the name of the tensor for a kernel and the function of it: by the kernel's id, and by
            its path, which may not be its own.
    """

    def __init__(self) -> None:
        self.read: dict[int | str, _Read] = {}

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        name = hf_weight_key
        if re.match(r"(layers|embed_tokens|norm)\.", name):  # a reader leaves out what is before
            name = f"model.{name}"
        if keras_variable.path.endswith("/kernel"):
            self.read |= dict.fromkeys((id(keras_variable), keras_variable.path), (name, hook_fn))

    def get_tensor(self, name: str) -> Any:
        raise _MissingTensorError(name)


def _record(reader: Any, task: Any) -> dict[int | str, _Read]:
    """Returns what a reader asks for: at least of the first block, if experts end the reading."""
    backbone, recorder = task.backbone, _Recorder()
    kind = reader.__name__.rpartition(".convert_")[2]
    if getattr(backbone, "vision_encoder", task) is None:
        kind += "_text"  # as Transformers calls models that might see images, but do not
    try:
        reader.convert_weights(backbone, recorder, {"model_type": kind})
    except _MissingTensorError:
        pass
    except KeyError:  # of the twin's config, of which only the type is given
        return {}
    except AttributeError as error:
        if error.obj is recorder:  # it wants more than names
            return {}
        raise UserError(
            f"Transformers has no model like this {type(backbone).__name__}: KerasHub's reader of "
            f"its twin expects parts that it lacks ({error}), so PEFT has no twin for its "
            "adapters. Write them merged, with --merge --output=FILE.safetensors."
        ) from error
    return recorder.read


def _locate(read: dict[int | str, _Read], kernel: Any) -> _Read:
    """Returns what is read for a kernel: blocks after the first one are read as it is."""
    name, move = read.get(id(kernel), ("", None))
    for number in re.finditer(r"\d+", "" if name else kernel.path):
        first = f"{kernel.path[: number.start()]}0{kernel.path[number.end() :]}"
        if first in read:
            name, move = read[first]
            name = re.sub(r"\b0\b", number.group(), name, count=1)
            break
    if name.removesuffix(".weight").rpartition(".")[2] in ("", *_ROUTERS):
        raise UserError(
            f"The adapted kernel {kernel.path!r} has no layer in the twin in Transformers that "
            "PEFT adapts: leave it out of model.lora_targets when you train, or write the adapters "
            "merged, with --merge."
        )
    return name, move


def _arrange(layer: Any, kernel: np.ndarray, move: Any) -> np.ndarray:
    """Returns a kernel as the matrix that `move` would turn into it, (out, in)."""
    inputs = kernel.shape[:1]
    if isinstance(layer, keras.layers.EinsumDense):
        labels, output = layer.equation.split(",")[1].split("->")
        inputs = [size for size, label in zip(kernel.shape, labels) if label not in output]
    width = math.prod(inputs)
    places = np.arange(kernel.size).reshape(-1, width)
    moved = places if move is None else _move(places, move, list(kernel.shape))
    if moved.shape != kernel.shape or len(np.unique(moved)) != kernel.size:
        raise UserError(
            f"Transformers has no single matrix that KerasHub would read {layer.path!r} from, so "
            "PEFT has no name for its adapters: write them merged, with --merge."
        )
    matrix = np.empty(kernel.size, kernel.dtype)
    matrix[moved.ravel()] = kernel.ravel()
    return matrix.reshape(-1, width)


def _move(places: np.ndarray, move: Any, shape: list[int]) -> np.ndarray:
    """Returns the places where `move` puts them, in parts that float16 holds: some readers cast."""
    moved = np.zeros(shape, np.int64)
    for unit in (1, _BASE, _BASE**2):
        moved = moved + np.asarray(move(places // unit % _BASE, shape)).astype(np.int64) * unit
    return moved
