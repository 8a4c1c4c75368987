"""LoRA: Hu et al. 2021 (https://arxiv.org/abs/2106.09685), and QLoRA: Dettmers et al. 2023.

An adapted layer adds the product of two small matrices to its kernel, and only these matrices are
trained; with QLoRA (https://arxiv.org/abs/2305.14314) the kernel itself has 8 or 4 bits.
"""

import contextlib
import fnmatch
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import quantizers

from tftpu import layer_internals as internals
from tftpu.errors import UserError, find_nearest
from tftpu.inference.export import check_unique_paths
from tftpu.kernels.assignment import assign
from tftpu.models.layers.convolution import QuantizedConvolution
from tftpu.models.layers.dense import Dense, dequantize_embeddings, dequantize_kernel
from tftpu.models.layers.heads import UntiedHead

BASES = ("", "int8", "int4")
ADAPTERS = ("lora_kernel_a", "lora_kernel_b")
_MOST = 8  # largest number of layers that a message names
_SCALES = ("kernel_scale", "kernel_zero", "g_idx")


def enable_lora(model: keras.Model, rank: int, targets: str = "", base: str = "") -> list[str]:
    """Adds LoRA adapters to layers of a model, and freezes the other layers.

    By default, all dense layers are adapted, also those of attention, except outputs: the output
    of a classifier is trained in full, and that of a language model is frozen. The product of new
    adapters is zero.

    Args:
        model: built; its weights may be loaded before or after.
        rank: the rank of the adapters, 1 or more. Their product is scaled by 1.
        targets: comma-separated globs over the paths of the layers to adapt, dense layers and
            convolutions: "*_attention/qkv,*_attention/out". All others are frozen, also a
            classifier. "" selects the default.
        base: "int8" or "int4" quantizes the kernels of the adapted layers, also when weights are
            loaded later; "" keeps their dtype. Dense and EinsumDense kernels get a scale for each
            column (int8) or for 128 rows of a column (int4), convolutions for each output channel.

    Returns:
        The paths of the adapted layers.

    Raises:
        UserError: an argument is not allowed, no layer can be adapted, or some already are.
    """
    _check(model, rank, base)
    layers = internals.flatten_layers(model)
    globs = [glob.strip() for glob in targets.split(",") if glob.strip()]
    heads = [] if globs else _find_heads(model, layers)
    adapted = _find_targets(model, layers, globs, heads)
    _check_rank(min(adapted, key=_find_largest_rank), rank)
    for layer in adapted:  # checks all layers before the first one is changed
        _check_base(layer, base)
    for layer in adapted:
        _adapt(layer, rank, base)
    kept = {id(layer) for layer in (*adapted, *heads)}
    _freeze(layers, kept)
    return [layer.path for layer in adapted]


def list_base(model: keras.Model) -> tuple[str, ...]:
    """Returns the paths of the frozen weights of an adapted model; () without adapters."""
    if not list_adapted(model):
        return ()
    return tuple(v.path for v in model.weights if not v.trainable)


def list_adapted(model: keras.Model) -> list[Any]:
    """Returns the layers that have adapters."""
    return [v for v in internals.flatten_layers(model) if getattr(v, "lora_enabled", False)]


def switch_off(model: keras.Model) -> None:
    """Sets adapters to zero, so that a model computes with its base weights alone."""
    for layer in list_adapted(model):
        second = layer.lora_kernel_b
        # Not `zeros_like`, because JAX rejects a variable as its argument.
        second.assign(keras.ops.zeros(second.shape, second.dtype))


def merge_weights(
    model: keras.Model, replaced: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Returns a model's weights by path, as floats, with adapters merged into their kernels.

    Args:
        model: the model with or without adapters, quantized or not.
        replaced: values to use instead of the weights, such as their moving averages, by path.

    Raises:
        UserError: a layer is quantized in a way that cannot be undone, or weights share a path.
    """
    check_unique_paths(model)
    found = {v.path: _to_array(v) for v in model.weights} | dict(replaced or {})
    for layer in internals.flatten_layers(model):
        if layer.quantization_mode is not None or getattr(layer, "lora_enabled", False):
            _merge(layer, found)
    return found


def _merge(layer: Any, found: dict[str, np.ndarray]) -> None:
    """Replaces a layer's integers, scales and adapters, in the dict `found`, by a float matrix."""
    name = "embeddings" if isinstance(layer, keras.layers.Embedding) else "kernel"
    first, second = (found.pop(f"{layer.path}/lora_{name}_{part}", None) for part in "ab")
    matrix = found[f"{layer.path}/{name}"]
    if layer.quantization_mode is not None:
        matrix = np.asarray(keras.ops.convert_to_numpy(_dequantize(layer)), "float32")
        for other in (f"{name}_scale", f"{name}_zero", "g_idx"):
            found.pop(f"{layer.path}/{other}", None)
    if first is not None and second is not None:
        more = _multiply(layer, first, second)
        matrix = (np.asarray(matrix, "float32") + more).astype(matrix.dtype)
    found[f"{layer.path}/{name}"] = matrix


def _multiply(layer: Any, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the scaled product of a layer's adapters, which is added to its kernel."""
    return layer.lora_alpha / layer.lora_rank * np.matmul(first, second)


def _dequantize(layer: Any) -> Any:
    """Returns the matrix of a quantized layer in floats, without adapters."""
    if layer.quantization_mode in ("int8", "int4"):
        kinds = keras.layers.Dense | keras.layers.EinsumDense | QuantizedConvolution
        if isinstance(layer, kinds):
            return dequantize_kernel(layer)
        reversible = isinstance(layer, keras.layers.ReversibleEmbedding)
        if isinstance(layer, keras.layers.Embedding) and not reversible:
            return dequantize_embeddings(layer)
    raise UserError(
        f"The layer {layer.path!r} is a {type(layer).__name__} quantized to "
        f"{layer.quantization_mode}. Its weights cannot be converted back to floats: only int8 "
        "and int4 weights of Dense, EinsumDense, Embedding and the zoo's convolutions can. Save "
        "the model before it is quantized."
    )


def assign_merged(
    plain: keras.Model, model: keras.Model, replaced: Mapping[str, np.ndarray] | None = None
) -> None:
    """Sets the weights of a model without adapters to the merged weights of one with them.

    Args:
        plain: built like `model`, without adapters; automatic names of layers may differ.
        model, replaced: as for `merge_weights`.
    """
    values = merge_weights(model, replaced)
    paths = {one.path: other.path for one, other in _pair_layers(plain, model)}
    for variable in plain.weights:
        owner, _, name = variable.path.rpartition("/")
        assign(variable, values[f"{paths.get(owner, owner)}/{name}"])


def assign_added(
    plain: keras.Model, model: keras.Model, replaced: Mapping[str, np.ndarray] | None = None
) -> None:
    """Sets the kernels of a model to the products of another model's adapters.

    Args:
        plain, model, replaced: as for `assign_merged`; weights without adapters are not changed.
    """
    values = replaced or {}
    if values:
        check_unique_paths(model)
    for one, other in _pair_layers(plain, model):
        if getattr(other, "lora_enabled", False):
            both = (getattr(other, name) for name in ADAPTERS)  # not by path: paths may repeat
            arrays = (values[v.path] if v.path in values else _to_array(v) for v in both)
            assign(one.kernel, _multiply(other, *arrays))


def _pair_layers(plain: keras.Model, model: keras.Model) -> list[tuple[Any, Any]]:
    """Returns pairs of the same layer in two models that differ only in their adapters."""
    both = internals.flatten_layers(plain), internals.flatten_layers(model)
    return list(zip(*both, strict=True))


def find_quantized(model: keras.Model) -> dict[str, Any]:
    """Returns the dense layers and convolutions that are quantized, by the path of their kernel."""
    kinds = keras.layers.Dense | QuantizedConvolution
    found = [v for v in internals.flatten_layers(model) if isinstance(v, kinds)]
    return {f"{v.path}/kernel": v for v in found if v.quantization_mode in ("int8", "int4")}


def compute_kernel_shape(layer: Any) -> tuple[int, ...]:
    """Returns the shape of the kernel of a layer of `find_quantized`, before it is quantized."""
    if isinstance(layer, QuantizedConvolution):
        return layer.kernel_shape
    return layer.input_spec.axes[-1], layer.units


def assign_quantized(layer: Any, value: np.ndarray) -> None:
    """Quantizes a kernel as Keras does, and assigns its integers and scales to a layer.

    Args:
        layer: a layer that `find_quantized` returns.
        value: floats of the shape `compute_kernel_shape(layer)`.
    """
    if isinstance(layer, QuantizedConvolution):
        for variable, rounded in layer.quantize_kernel(value):
            assign(variable, rounded)
        return
    value = np.asarray(value, "float32")
    rows = internals.count_rows_per_scale(layer)
    if layer.quantization_mode == "int4" and rows:
        integers, scale, zero = quantizers.abs_max_quantize_grouped_with_zero_point(
            value, block_size=rows, epsilon=1e-7, to_numpy=True
        )
        assign(layer.kernel_zero, np.asarray(zero))
    else:
        bits = (-127, 127) if layer.quantization_mode == "int8" else (-8, 7)
        integers, scale = quantizers.abs_max_quantize(
            value, axis=0, value_range=bits, epsilon=1e-7, to_numpy=True
        )
        scale = np.squeeze(np.asarray(scale), 0)
    if layer.quantization_mode == "int4":
        integers, _, _ = quantizers.pack_int4(integers, axis=-1)
    assign(internals.find_stored_matrix(layer), np.asarray(integers))
    assign(layer.kernel_scale, np.asarray(scale))


def list_added_weights(model: keras.Model) -> set[str]:
    """Returns the paths of adapters and quantization scales, which the base model's files lack."""
    found = {f"{v.path}/{name}" for v in list_adapted(model) for name in ADAPTERS}
    for layer in find_quantized(model).values():
        found |= {f"{layer.path}/{name}" for name in _SCALES}
    return found


def _check(model: keras.Model, rank: int, base: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral) or rank < 1:
        raise UserError(
            f"model.lora={rank}: give the rank of the adapters, an integer of 1 or more."
        )
    if base not in BASES:
        raise UserError(f"model.lora_base={base!r}: give int8 or int4, or leave it out.")
    before = [v.path for v in list_adapted(model)]
    if before:
        raise UserError(
            f"The model {model.name!r} has adapters already, for example in {before[0]!r}. A "
            "model can be adapted only once: build it again for adapters of another rank or in "
            "other layers."
        )


def _check_rank(layer: Any, rank: int) -> None:
    """Raises `UserError` if a rank is larger than the shape of a layer's kernel allows."""
    shape, most = tuple(layer.kernel.shape), _find_largest_rank(layer)
    if rank > most:
        raise UserError(
            f"model.lora={rank}: the kernel of {layer.path!r} has the shape {shape}, so the rank "
            f"of its adapters is at most {most}. Give a lower rank, or name other layers with "
            "model.lora_targets."
        )


def _find_largest_rank(layer: Any) -> int:
    # The shapes of Keras's adapters are (*shape[:-1], rank) and (rank, shape[-1]).
    shape = tuple(layer.kernel.shape)
    return min(math.prod(shape[:-1]), shape[-1])


def _find_heads(model: keras.Model, layers: list[Any]) -> list[Any]:
    """Returns the dense layers that are outputs of a model; empty for a language model.

    A layer without weights may follow, such as the activation of a classifier.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    ends = {id(output) for output in outputs}
    for layer in reversed(model.layers if outputs else []):
        one = isinstance(getattr(layer, "input", None), keras.KerasTensor)
        if one and not layer.weights and id(layer.output) in ends:
            ends.add(id(layer.input))
    dense = [v for v in layers if isinstance(v, keras.layers.Dense | keras.layers.EinsumDense)]
    own = [v for v in dense if v in model.layers and not isinstance(v, UntiedHead)]
    return [v for v in own if id(v.output) in ends] if outputs else []


def _find_targets(
    model: keras.Model, layers: list[Any], globs: list[str], heads: list[Any]
) -> list[Any]:
    """Returns the layers whose paths match a glob; without globs, the default layers."""
    kinds = keras.layers.Dense | keras.layers.EinsumDense
    # KerasHub's backbones, which are models, also have a method `enable_lora`.
    able = [v for v in layers if hasattr(v, "enable_lora") and not isinstance(v, keras.Model)]
    able = [v for v in able if v.built]
    able = [v for v in able if not isinstance(v, keras.layers.Embedding)]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(layer.path, glob) for layer in able):
            raise UserError(
                f"model.lora_targets: no dense layer or convolution matches {glob!r}. "
                f"{_format_layers(model, able)}{_suggest_glob(glob, able)}"
            )
    if globs:
        return [v for v in able if any(fnmatch.fnmatchcase(v.path, glob) for glob in globs)]
    unwanted = {id(head) for head in heads}
    found = [v for v in able if isinstance(v, kinds) and not isinstance(v, UntiedHead)]
    found = [v for v in found if id(v) not in unwanted]
    if not found:
        raise UserError(
            f"The model {model.name!r} has no dense layer except its outputs, which are trained "
            "without adapters: name the layers to adapt with model.lora_targets. "
            f"{_format_layers(model, able)}"
        )
    return found


def _format_layers(model: keras.Model, able: list[Any]) -> str:
    if not able:
        return f"The model {model.name!r} has no such layer that is built."
    names = [layer.path for layer in able]
    if len(names) > _MOST:  # names the layers of equal blocks once, as globs
        names = list(dict.fromkeys(re.sub(".*/", "*/", name) for name in names))
    return f"It has {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}."


def _suggest_glob(glob: str, able: list[Any]) -> str:
    """Returns a question, " Did you mean …?", with a similar glob that matches a layer; or ""."""
    parts = [part for layer in able for part in layer.path.split("/")]
    words = {word for part in parts for word in (part, *part.split("_"))}
    given = max(re.split(r"[*?/_\[\]]", glob), key=len)
    # Words with digits are left out: they name one of many equal blocks.
    near = find_nearest(given, [word for word in words if not re.search(r"\d", word)])
    meant = glob.replace(given, near) if given and near else glob
    for one in (meant, f"*/{meant}", f"*{meant}"):
        if any(fnmatch.fnmatchcase(layer.path, one) for layer in able):
            return f" Did you mean {one!r}?"
    return ""


def _adapt(layer: Any, rank: int, base: str) -> None:
    # A variable that is added after the model was built would lack the outer layers in its path.
    with contextlib.ExitStack() as scopes:
        for part in layer.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(part))
        if base:
            _quantize(layer, base)
        layer.enable_lora(rank)
    for variable in layer.weights:
        variable.trainable = variable.path.endswith(ADAPTERS)


def _check_base(layer: Any, base: str) -> None:
    """Raises `UserError` if the kernel of a layer cannot be quantized to `base`."""
    if not base or layer.quantization_mode == base:
        return
    if layer.quantization_mode is not None:
        raise UserError(
            f"model.lora_base={base!r}: the layer {layer.path!r} is already quantized to "
            f"{layer.quantization_mode}: set model.lora_base to that, or leave it out."
        )
    known = type(layer) in (Dense, keras.layers.Dense, keras.layers.EinsumDense)
    if not known and not isinstance(layer, QuantizedConvolution):
        kind = type(layer).__name__
        raise UserError(
            f"model.lora_base={base!r} works only with Dense and EinsumDense layers and the "
            f"zoo's convolutions, but {layer.path!r} is of the class {kind}. Leave that layer out "
            "of model.lora_targets, or leave out lora_base. (In a program these are the arguments "
            "targets and base.)"
        )


def _quantize(layer: Any, base: str) -> None:
    """Quantizes the kernel of a dense layer or a convolution."""
    if layer.quantization_mode == base:
        return
    # `Any`, because Keras's annotations do not allow None, which leaves activations unquantized.
    quantizers: Any = keras.quantizers
    if base == "int8":
        config = quantizers.Int8QuantizationConfig(activation_quantizer=None)
    else:
        config = quantizers.Int4QuantizationConfig()
    if internals.replace_traced_value(internals.find_stored_matrix(layer)) and base == "int4":
        raise UserError(
            "model.lora_base=int4: the JAX engine cannot price it, because Keras packs 4-bit "
            "integers with NumPy. Price model.lora_base=int8, whose kernels take twice the memory; "
            "or, without a mesh, --config.cluster.engine=tensorflow. Training works on both."
        )
    layer.quantize(base, config=config)


def _freeze(layers: list[Any], kept: set[int]) -> None:
    """Freezes all layers except the ids in `kept`; around those, only a layer's own variables."""
    for layer in layers:
        if id(layer) in kept:
            continue
        inside = [v for v in internals.flatten_layers(layer) if id(v) in kept]
        if not inside:
            layer.trainable = False
            continue
        theirs = {
            id(variable) for v in internals.flatten_layers(layer)[1:] for variable in v.weights
        }
        for variable in layer.weights:
            if id(variable) not in theirs:
                variable.trainable = False


def _to_array(variable: keras.Variable) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))
