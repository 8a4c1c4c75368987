"""Compares a model with a copy that its class built and that was never called."""

import types
from typing import Any

import keras
import numpy as np

from tftpu import layer_internals
from tftpu.blocks.structure import describe_value


def find_difference(copy: keras.Layer, layer: keras.Layer, place: str = "it") -> str | None:
    """Returns the first place in which a layer differs from its copy; None if they are alike.

    State that the first call creates is ignored, because the copy lacks it. Keras's own layers are
    compared by their configs, and others by the attributes that the copy has.

    Args:
        copy: the copy, which was not called.
        layer: the layer, or model.
        place: the name of the layer in the result.
    """
    if type(copy) is not type(layer) or copy.trainable != layer.trainable:
        return place
    if copy.dtype_policy.name != layer.dtype_policy.name:
        return f"the dtype of {place}"
    if is_of_keras(type(layer)):
        if isinstance(copy, keras.Model) and isinstance(layer, keras.Model):
            return _compare(_list_operations(copy), _list_operations(layer), place)
        known, found = (_simplify(one.get_config()) for one in (copy, layer))
        alike = known.keys() >= found.keys() and all(
            describe_value(value) == describe_value(found.get(key))
            or (value is None and layer.built and key == "attention_axes")
            for key, value in known.items()
        )
        return None if alike else place
    known, found = (layer_internals.read_settings(one) for one in (copy, layer))
    for name, value in known.items():
        inner = name if place == "it" else f"{place}.{name}"
        if name not in found:
            return inner
        made = value is None and isinstance(found[name], (keras.Variable, keras.Layer))
        if not made and (different := _compare(value, found[name], inner)) is not None:
            return different
    return None


def is_of_keras(kind: Any) -> bool:
    """Returns whether a class or function belongs to Keras or to Python's built-ins."""
    return kind.__module__.partition(".")[0] in ("keras", "builtins")


def _simplify(config: Any) -> Any:
    """Returns a Keras layer's config without names and without changes by the first call.

    The first call adds the shape that an inner layer is built for, and turns an axis into a list.
    """
    if isinstance(config, dict):
        left = {key: value for key, value in config.items() if key not in ("name", "build_config")}
        return {key: _simplify(value) for key, value in left.items()}
    if isinstance(config, (list, tuple)):
        simple = [_simplify(value) for value in config]
        return simple[0] if len(simple) == 1 else simple
    return config


def _list_operations(model: keras.Model) -> list[Any]:
    """Returns the layers of a functional or sequential model, and classes of other operations."""
    if isinstance(model, keras.Sequential):  # has no graph before its first call
        return model.layers
    found: Any = model
    return [one if isinstance(one, keras.Layer) else type(one) for one in found.operations]


def _compare(copy: Any, value: Any, place: str) -> str | None:
    """Returns the first place in which a value differs from the copy's; None if they are alike."""
    if isinstance(copy, keras.Layer) and isinstance(value, keras.Layer):
        return find_difference(copy, value, place)
    if isinstance(copy, keras.Variable) and isinstance(value, keras.Variable):
        known = [(tuple(v.shape), v.dtype, v.trainable, v.regularizer) for v in (copy, value)]
        return None if known[0] == known[1] else place
    if isinstance(copy, (list, tuple)) and isinstance(value, (list, tuple)):
        if len(copy) != len(value):
            return place
        found = (_compare(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(copy, value)))
        return next((one for one in found if one), None)
    if isinstance(copy, dict) and isinstance(value, dict):
        if copy.keys() != value.keys():
            return place
        found = (_compare(copy[key], value[key], f"{place}[{key!r}]") for key in copy)
        return next((one for one in found if one), None)
    return None if _describe(copy) == _describe(value) else place


def _describe(value: Any) -> Any:
    """Returns a representation of a value, the same for every value with the same meaning."""
    if isinstance(value, types.FunctionType):  # a constructor may define a new one at each call
        held = [_describe(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__code__, held
    if keras.ops.is_tensor(value) or isinstance(value, np.generic):
        return describe_value(np.asarray(value))
    return describe_value(value)
