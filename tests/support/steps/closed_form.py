"""The FLOPs of a forward pass in closed form, from the configs of Keras's layers.

Each application of a layer counts: 2 x multiply-adds with its weights, of which those with padding
are left out. A call of the model tells which layers it applies, to what shapes.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

Shape = tuple[int, ...]


def forward_flops(run: Callable[[], Any]) -> int:
    """Returns the FLOPs of the layers that a function applies.

    Args:
        run: calls a model once.
    """
    found = 0
    apply = keras.Layer.__call__

    def recorded(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal found
        output = apply(layer, *args, **kwargs)
        formula = next((_FORMULAS[kind] for kind in type(layer).__mro__ if kind in _FORMULAS), None)
        if formula and args:
            shapes = [tuple(tensor.shape) for tensor in keras.tree.flatten([args[0], output])]
            found += 2 * formula(layer, shapes[0], shapes[-1], kwargs)
        return output

    with mock.patch.object(keras.Layer, "__call__", recorded):
        run()
    return found


def real_products(size: int, outputs: int, kernel: int, stride: int, dilation: int, same: bool):
    """Returns how many of the products along an axis are with elements, not with padding."""
    reach = dilation * (kernel - 1) + 1
    missing = max(0, (outputs - 1) * stride + reach - size) if same else 0
    padded = np.pad(np.ones(size, int), (missing // 2, missing - missing // 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach)
    return int(windows[::stride, ::dilation][:outputs].sum())


def _along_axes(layer: Any, given: Shape, outputs: Shape) -> int:
    """Returns the real products over all spatial axes, for one channel in and one out.

    Around a dilated convolution TensorFlow lays its own zeros, which are data to XLA.
    """
    if max(layer.dilation_rate) > 1:
        return math.prod(outputs) * math.prod(layer.kernel_size)
    return math.prod(
        real_products(*axis, layer.padding == "same")
        for axis in zip(given, outputs, layer.kernel_size, layer.strides, layer.dilation_rate)
    )


def _convolution(layer: Any, x: Shape, y: Shape, _: Any) -> int:
    of_group = x[-1] // layer.groups
    return x[0] * _along_axes(layer, x[1:-1], y[1:-1]) * of_group * layer.filters


def _transposed(layer: Any, x: Shape, y: Shape, _: Any) -> int:
    """Counts as the convolution does that would make the input from the output."""
    return x[0] * _along_axes(layer, y[1:-1], x[1:-1]) * x[-1] * layer.filters


def _depthwise(layer: Any, x: Shape, y: Shape, _: Any) -> int:
    return x[0] * _along_axes(layer, x[1:-1], y[1:-1]) * x[-1] * layer.depth_multiplier


def _separable(layer: Any, x: Shape, y: Shape, _: Any) -> int:
    pointwise = math.prod(y[:-1]) * x[-1] * layer.depth_multiplier * layer.filters
    return _depthwise(layer, x, y, _) + pointwise


def _dense(layer: Any, x: Shape, *_: Any) -> int:
    return math.prod(x) * layer.units


def _einsum_dense(layer: Any, x: Shape, *_: Any) -> int:
    """Returns weights x tokens, which are what the kernel has no axis for."""
    given, kernel = layer.equation.partition("->")[0].split(",")
    tokens = math.prod(n for name, n in zip(given, x, strict=True) if name not in kernel)
    return math.prod(layer.kernel.shape) * tokens


def _tied_head(layer: Any, x: Shape, _: Shape, kwargs: Any) -> int:
    return math.prod(x) * layer.input_dim if kwargs.get("reverse") else 0


def _recurrent(gates: int) -> Callable[..., int]:
    def formula(layer: Any, x: Shape, *_: Any) -> int:
        examples, steps, inputs = x
        return examples * steps * gates * (inputs + layer.units) * layer.units

    return formula


def _conv_lstm(layer: Any, x: Shape, y: Shape, _: Any) -> int:
    """Returns that of 4 gates; the state is convolved without strides, and with padding."""
    states = y[-3:-1]
    of_inputs = _along_axes(layer, x[2:-1], states) * x[-1]
    of_state = math.prod(
        real_products(n, n, kernel, 1, 1, True) for n, kernel in zip(states, layer.kernel_size)
    )
    return math.prod(x[:2]) * 4 * (of_inputs + of_state * layer.filters) * layer.filters


_FORMULAS: dict[type, Callable[..., int]] = {
    **dict.fromkeys((layers.Conv1D, layers.Conv2D, layers.Conv3D), _convolution),
    **dict.fromkeys((layers.Conv2DTranspose, layers.Conv3DTranspose), _transposed),
    layers.DepthwiseConv2D: _depthwise,
    layers.SeparableConv2D: _separable,
    layers.Dense: _dense,
    layers.EinsumDense: _einsum_dense,
    layers.ReversibleEmbedding: _tied_head,
    layers.LSTM: _recurrent(4),
    layers.GRU: _recurrent(3),
    layers.ConvLSTM2D: _conv_lstm,
}
