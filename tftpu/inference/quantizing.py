"""Weight-only quantization: integers of 8 or 4 bits, and their scales.

A matrix product, a convolution or a lookup gets the integers times their scale, in float32. So a
model whose weights were replaced by `Quantized.values` computes the same as its export.

With 8 bits, each channel has a scale that maps its largest value to the largest integer. With 4
bits, each group of 32 to 64 values of a channel has a scale, or the whole channel if no such size
divides it. It is the one of several scales with the least squared error, because clipping a few
outliers leaves finer steps for all others (Banner et al. 2019, https://arxiv.org/abs/1810.05723).
"""

import dataclasses
import math

import keras
import numpy as np

from tftpu.engines import keras_internals
from tftpu.errors import UserError

BITS = {"int8": 8, "int4": 4}
SMALLEST = 256  # number of values; a weight with fewer values stays in float32
# Number of values that share a 4-bit scale: the first of these that divides a channel.
_GROUP = range(64, 31, -1)
# Candidates for the value of the largest integer, as fractions of the largest weight, by bits.
_TRIED = {8: np.ones(1), 4: np.linspace(1.0, 0.8, 17)}


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight as integers.

    Attributes:
        shape: the shape of the weight.
        codes: int8, the integers of the weight's values, in the same order, in a shape with which
            `scale` broadcasts; from -8 to 7 with 4 bits.
        scale: float32, the value of one integer step.
        bits: 8 or 4.
    """

    shape: tuple[int, ...]
    codes: np.ndarray
    scale: np.ndarray
    bits: int

    @property
    def values(self) -> np.ndarray:
        """The weight in float32."""
        return (self.codes.astype("float32") * self.scale).reshape(self.shape)

    @property
    def bytes(self) -> int:
        """The size of the packed integers and the scales, in bytes."""
        return -(-self.codes.size * self.bits // 8) + self.scale.nbytes

    @property
    def packed(self) -> np.ndarray:
        """The 4-bit codes plus 8, flat uint8, two in a byte, the first one in its lower half."""
        raised = (self.codes.reshape(-1) + 8).astype(np.uint8)
        pairs = np.pad(raised, (0, raised.size % 2)).reshape(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4


def quantize_weights(model: keras.Model, bits: int) -> dict[str, Quantized]:
    """Quantizes the kernels and tables of a model; returns them by path.

    Biases, norms and weights with fewer than 256 values stay unchanged. Tables, such as embeddings,
    always get 8 bits: with 4 bits, the tied head of a language model loses more than all its
    kernels together. The channels of a kernel are its outputs, those of a table its rows.

    Args:
        model: the built model, which is not changed.
        bits: 8 or 4, for the kernels.
    """
    found, known = {}, _find_kernel_axes(model)
    for variable in model.weights:
        shape = tuple(variable.shape)
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if is_float and len(shape) > 1 and np.prod(shape) >= SMALLEST:
            value = np.asarray(keras.ops.convert_to_numpy(variable), "float32")
            table = "kernel" not in variable.name
            axes = known.get(variable.path, (0 if table else len(shape) - 1,))
            found[variable.path] = quantize_weight(value, axes, 8 if table else bits)
    return found


def refuse_quantized(model: keras.Model) -> None:
    """Raises `UserError` if a trainable layer of a model is quantized and has no adapters.

    The integers have no gradient, so only the other weights would be trained.
    """
    for layer in keras_internals.list_layers(model):
        mode = getattr(layer, "quantization_mode", None)
        adapted = getattr(layer, "lora_enabled", False)
        if mode is not None and layer.trainable and not adapted:
            raise UserError(
                f"The layer {layer.path!r} is quantized to {mode}, and integers cannot be trained. "
                "Train the model in floats and quantize it afterwards, or train adapters with "
                'tftpu.models.enable_lora(model, 8, base="int8"), or freeze the layer with '
                "trainable = False. A quantized model can still evaluate and predict."
            )


def _find_kernel_axes(model: keras.Model) -> dict[str, tuple[int, ...]]:
    """Returns the channel dimensions, by path, of kernels where they are not the last one."""
    layers, found = keras.layers, {}
    depthwise = layers.DepthwiseConv1D | layers.DepthwiseConv2D
    separable = layers.SeparableConv1D | layers.SeparableConv2D
    transposed = layers.Conv1DTranspose | layers.Conv2DTranspose | layers.Conv3DTranspose
    for layer in keras_internals.list_layers(model):
        for variable in layer.weights:
            last = len(variable.shape) - 1
            if variable.name == "depthwise_kernel" or isinstance(layer, depthwise):
                if isinstance(layer, depthwise | separable) and last > 1:
                    found[variable.path] = (last - 1, last)
            elif isinstance(layer, transposed) and last > 1:
                found[variable.path] = (last - 1,)
    return found


def quantize_weight(value: np.ndarray, axes: int | tuple[int, ...], bits: int) -> Quantized:
    """Quantizes a weight.

    Args:
        value: float32.
        axes: the dimensions of its channels; a depthwise kernel has two.
        bits: 8 or 4.
    """
    largest = 2 ** (bits - 1) - 1
    grouped, together = _group_values(value, (axes,) if isinstance(axes, int) else axes, bits)
    reach = np.abs(grouped).max(together, keepdims=True)
    best = np.full(reach.shape, np.inf, "float32")
    scale = np.ones(reach.shape, "float32")
    for share in _TRIED[bits]:
        tried = np.maximum(reach * np.float32(share / largest), np.finfo("float32").tiny)
        off = np.clip(np.rint(grouped / tried), -largest - 1, largest) * tried - grouped
        error = np.square(off).sum(together, keepdims=True)
        scale, best = np.where(error < best, tried, scale), np.minimum(error, best)
    codes = np.clip(np.rint(grouped / scale), -largest - 1, largest).astype(np.int8)
    return Quantized(value.shape, codes, scale, bits)


def _group_values(
    value: np.ndarray, axes: tuple[int, ...], bits: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns a weight reshaped into groups, and the dimensions of the values in a group."""
    channels = math.prod(value.shape[axis] for axis in axes)
    count = value.size // channels
    size = next((n for n in _GROUP if bits == 4 and count % n == 0), None)
    if size is None or axes not in ((0,), (value.ndim - 1,)):
        return value, tuple(n for n in range(value.ndim) if n not in axes)
    if axes == (0,):
        return value.reshape(channels, count // size, size), (2,)
    return value.reshape(count // size, size, channels), (1,)
