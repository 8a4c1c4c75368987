"""Converts the kernels of a KerasHub task to the matrices of its twin in Transformers.

KerasHub's reader of a family calls a loader for each variable, with the name of the twin's tensor
and a function that rearranges the tensor. Applied to a tensor of indices, the function shows where
each element of a kernel belongs in the twin.

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
_ROUTERS = ("gate", "router")  # modules that route tokens to experts; PEFT does not adapt them
_BASE = 1024
_Read = tuple[str, Callable[[np.ndarray, list[int]], np.ndarray] | None]


def find_matrices(task: Any) -> dict[str, np.ndarray] | None:
    """Returns the kernels of a causal language model that are not zero, as matrices of its twin.

    Returns:
        The matrices, (out, in), by the names of the twin's tensors; None if KerasHub has no reader
        for the family, or one that needs more of the twin than the names of tensors.

    Raises:
        UserError: Transformers has no such model, or PEFT does not adapt the layer of a kernel.
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
    """A reader needs the content of a tensor; `args` holds the tensor's name."""


class _Recorder:
    """A loader without tensors, which records the tensors that a reader requests.

    Attributes:
        read: for each kernel, the name of its tensor and the function that rearranges the tensor.
            The keys are the kernel's id and its path, which several kernels may share.
    """

    def __init__(self) -> None:
        self.read: dict[int | str, _Read] = {}

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        name = hf_weight_key
        if re.match(r"(layers|embed_tokens|norm)\.", name):  # some readers omit the prefix
            name = f"model.{name}"
        if keras_variable.path.endswith("/kernel"):
            self.read |= dict.fromkeys((id(keras_variable), keras_variable.path), (name, hook_fn))

    def get_tensor(self, name: str) -> Any:
        raise _MissingTensorError(name)


def _record(reader: Any, task: Any) -> dict[int | str, _Read]:
    """Runs a reader until it needs a tensor's content; returns its record, {} if it needs more."""
    backbone, recorder = task.backbone, _Recorder()
    kind = reader.__name__.rpartition(".convert_")[2]
    if getattr(backbone, "vision_encoder", task) is None:
        kind += "_text"  # Transformers' name for a model without its vision encoder
    try:
        reader.convert_weights(backbone, recorder, {"model_type": kind})
    except _MissingTensorError:
        pass
    except KeyError:  # the reader needs more of the twin's config than its type
        return {}
    except AttributeError as error:
        if error.obj is recorder:  # the recorder lacks a method of the loader
            return {}
        raise UserError(
            f"Transformers has no model like this {type(backbone).__name__}: KerasHub's reader "
            f"of the family expects parts that it lacks ({error}), so PEFT has no names for its "
            "adapters. Write them merged, with --merge --output=FILE.safetensors."
        ) from error
    return recorder.read


def _locate(read: dict[int | str, _Read], kernel: Any) -> _Read:
    """Returns the entry of `read` for a kernel; a missing one is derived from that of block 0."""
    name, move = read.get(id(kernel), ("", None))
    for number in re.finditer(r"\d+", "" if name else kernel.path):
        first = f"{kernel.path[: number.start()]}0{kernel.path[number.end() :]}"
        if first in read:
            name, move = read[first]
            name = re.sub(r"\b0\b", number.group(), name, count=1)
            break
    if name.removesuffix(".weight").rpartition(".")[2] in ("", *_ROUTERS):
        raise UserError(
            f"The adapted kernel {kernel.path!r} has no counterpart in Transformers that PEFT "
            "adapts: leave it out of model.lora_targets when you train, or write the adapters "
            "merged, with --merge."
        )
    return name, move


def _arrange(layer: Any, kernel: np.ndarray, move: Any) -> np.ndarray:
    """Returns the matrix, (out, in), from which `move` would make the kernel of a layer."""
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
    """Rearranges indices with `move`, a base-1024 digit at a time: float16 holds digits exactly."""
    moved = np.zeros(shape, np.int64)
    for unit in (1, _BASE, _BASE**2):
        moved = moved + np.asarray(move(places // unit % _BASE, shape)).astype(np.int64) * unit
    return moved
