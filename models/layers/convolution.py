"""The zoo's convolutions, whose kernels may be integers of 8 or 4 bits."""

from typing import Any, cast

import keras
import numpy as np
from keras import quantizers

from tftpu import layer_internals as internals
from tftpu.models.layers.dense import dequantize_kernel
from tftpu.tensors import ops

# The zoo's images have this order, whatever keras.json chooses as the default.
CHANNELS_LAST = "channels_last"
_RANGES = {"int8": (-127, 127), "int4": (-8, 7)}


class QuantizedConvolution(keras.layers.Layer):
    """A base class of convolutions with integer kernels, which Keras's own do not support.

    Each channel has a scale, set by its largest absolute value. Activations are never quantized,
    even if the config that `quantize` receives asks for it.

    Attributes:
        kernel: the kernel as the layer uses it: a variable, or a tensor if it is dequantized or
            adapted.
        kernel_scale: for a quantized layer, float32 of the shape of its channels: integers divided
            by it are the kernel.
        kernel_shape: for a quantized layer, the shape of the kernel, whose integers may be packed.
        channel_axes: the axes of a kernel that its output channels span, as negative numbers.
    """

    channel_axes = (-1,)

    def __init__(self, *args: Any, data_format: str = CHANNELS_LAST, **kwargs: Any):
        super().__init__(*args, data_format=data_format, **kwargs)

    @property
    def kernel(self) -> Any:
        if getattr(self, "_kernel", None) is None:
            raise AttributeError(f"The layer {self.name!r} has no kernel before it is built.")
        quantized = self.quantization_mode is not None
        kernel = dequantize_kernel(self) if quantized else self._kernel
        if not getattr(self, "lora_enabled", False):
            return kernel
        private: Any = self  # Keras's type of depthwise convolutions declares no adapters
        more = ops.matmul(private.lora_kernel_a, private.lora_kernel_b)
        scale = private.lora_alpha / private.lora_rank
        return ops.cast(kernel + scale * more, self.compute_dtype)

    @kernel.setter
    def kernel(self, value: Any) -> None:
        self._kernel = value

    def build(self, input_shape: Any) -> None:
        mode = self.quantization_mode
        if mode not in (None, *_RANGES):
            raise NotImplementedError(
                f"The convolution {self.name!r} cannot have the dtype {self.dtype_policy.name!r}: "
                "its kernel can only be quantized to int8 or int4."
            )
        super().build(input_shape)
        if mode is not None:  # the layer is loaded from a file
            self._hold_integers(mode)

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> None:
        """Rounds the kernel to "int8" or "int4".

        Args:
            mode: one of the two. Others raise `NotImplementedError`, which `keras.Model.quantize`
                turns into a warning.
            type_check, config: ignored; Keras passes them to every layer.
        """
        if mode not in _RANGES:
            raise NotImplementedError(
                f"A convolution can be quantized to int8 or int4, not to {mode}: the layer "
                f"{self.name!r} stays unchanged."
            )
        value = np.asarray(keras.ops.convert_to_numpy(self._kernel))
        self._hold_integers(mode)
        self.dtype_policy = keras.dtype_policies.get(f"{mode}_from_{self.dtype_policy.name}")
        for variable, rounded in self.quantize_kernel(value):
            variable.assign(rounded)

    def quantized_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def quantize_kernel(self, kernel: np.ndarray) -> list[tuple[keras.Variable, np.ndarray]]:
        """Returns the variables of the quantized layer, and their values for a kernel.

        Args:
            kernel: floats, in the shape that the kernel had before it was quantized.
        """
        kernel = np.asarray(kernel, "float32")
        channels = {axis % kernel.ndim for axis in self.channel_axes}
        together = tuple(axis for axis in range(kernel.ndim) if axis not in channels)
        mode = cast(str, self.quantization_mode)
        integers, scale = quantizers.abs_max_quantize(
            kernel, axis=together, value_range=_RANGES[mode], epsilon=1e-7, to_numpy=True
        )
        if mode == "int4":
            integers, _, _ = quantizers.pack_int4(integers, axis=self.channel_axes[0])
        scale = np.squeeze(np.asarray(scale), together)
        return [(self._kernel, np.asarray(integers)), (self.kernel_scale, scale)]

    def save_own_variables(self, store: Any) -> None:
        if self.quantization_mode is None:
            super().save_own_variables(store)
        else:  # Keras's method would save the kernel as floats
            keras.layers.Layer.save_own_variables(self, store)

    def load_own_variables(self, store: Any) -> None:
        if self.quantization_mode is None:
            super().load_own_variables(store)
        else:
            keras.layers.Layer.load_own_variables(self, store)

    def _hold_integers(self, mode: str) -> None:
        """Replaces the kernel by new variables for integers and scales; sets no values."""
        shape = tuple(self._kernel.shape)
        self.kernel_shape, stored, axis = shape, list(shape), self.channel_axes[0]
        if mode == "int4":
            stored[axis] = -(-shape[axis] // 2)
        with internals.becoming_quantized(self, self._kernel):
            self._kernel = self._add_constant("kernel", tuple(stored), "int8", "zeros")
            scales = tuple(shape[axis] for axis in self.channel_axes)
            self.kernel_scale = self._add_constant("kernel_scale", scales, "float32", "ones")

    def _add_constant(
        self, name: str, shape: tuple[int, ...], dtype: str, initializer: str
    ) -> keras.Variable:
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            dtype=dtype,
            trainable=False,
            autocast=False,
        )


@keras.saving.register_keras_serializable("tftpu")
class Conv2D(QuantizedConvolution, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` that can be quantized, with adapters or without."""


@keras.saving.register_keras_serializable("tftpu")
class DepthwiseConv2D(QuantizedConvolution, keras.layers.DepthwiseConv2D):
    """A `keras.layers.DepthwiseConv2D` that can be quantized."""

    channel_axes = (-2, -1)
