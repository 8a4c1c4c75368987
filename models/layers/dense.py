"""The zoo's dense layer, and functions to read weights that may be quantized or adapted."""

import functools
import operator
from typing import Any, cast

import keras
from keras import quantizers

from tftpu import layer_internals as internals
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops

_ADAPTERS = ("lora_kernel_a", "lora_kernel_b")


@keras.saving.register_keras_serializable("tftpu")
class Dense(keras.layers.Dense):
    """A `keras.layers.Dense` with a cheaper LoRA.

    Keras adds the product of the two adapters to the kernel, so that a backward pass computes a
    gradient of the kernel's size. Here the input is multiplied by one adapter after the other,
    (x A) B, as in Hu et al. 2021 (https://arxiv.org/abs/2106.09685).
    """

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        if not self.lora_enabled:
            return super().call(inputs, training=training)
        x = self.compute_product(inputs)
        if self.bias is not None:
            x = x + self.bias
        return x if self.activation is None else self.activation(x)

    def compute_product(self, x: Tensor) -> Tensor:
        """Returns the product of (..., channels) with the kernel, without bias and activation."""
        terms = [ops.matmul(given, matrix) for given, matrix in self.compute_factors(x)]
        return functools.reduce(operator.add, terms)

    def compute_factors(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of an input and a matrix, whose products add up to x times the kernel."""
        adapters = self.compute_low_rank()
        if adapters is None:
            return [(x, self.compute_base())]
        first, second = adapters
        return [(x, self.compute_base()), (ops.matmul(x, first), second)]

    def compute_base(self) -> Tensor:
        """Returns the kernel without adapters, (channels, units), dequantized."""
        if self.quantization_mode is None:
            return ops.convert_to_tensor(internals.find_stored_matrix(self))
        return dequantize_kernel(self)

    def compute_low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Returns the adapters, (channels, rank) and (rank, units), scaled; None without LoRA."""
        if not self.lora_enabled:
            return None
        # Keras sets both when it adds the adapters.
        scale = cast(float, self.lora_alpha) / cast(int, self.lora_rank)
        b = ops.convert_to_tensor(self.lora_kernel_b)
        return ops.convert_to_tensor(self.lora_kernel_a), b if scale == 1.0 else b * scale

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> None:
        # Keras's check rejects subclasses, because it does not know their `call`.
        super().quantize(mode, type_check=type_check and type(self) is not Dense, config=config)

    def save_own_variables(self, store: Any) -> None:
        if not self.lora_enabled or self.quantization_mode is None:
            super().save_own_variables(store)
            return
        # Keras would round the adapters into the integers, which changes what the layer computes.
        self.lora_enabled = False
        try:
            super().save_own_variables(store)
        finally:
            self.lora_enabled = True
        for name in _ADAPTERS:
            store[name] = getattr(self, name)

    def load_own_variables(self, store: Any) -> None:
        names = list(store.keys())
        if not self.lora_enabled and any(name in names for name in _ADAPTERS):
            raise UserError(
                f"The file has adapters of the layer {self.path!r}, which has none: call "
                "tftpu.models.enable_lora(model, rank) first."
            )
        super().load_own_variables(store)  # sets adapters to zero, for files that hold their sum
        for name in _ADAPTERS if self.lora_enabled else ():
            if name in names:
                getattr(self, name).assign(store[name])


class DenseContainer(keras.layers.Layer):
    """A layer that contains dense layers, and whose config says which of them are quantized.

    Args:
        forms: the config entries that restore the quantization and LoRA of each quantized dense
            layer, by the layer's name; from `get_config`.
    """

    def __init__(self, forms: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._forms = forms or {}

    def build_dense(self, name: str, units: int, input_shape: Any, **options: Any) -> Dense:
        """Returns a built dense layer.

        Args:
            name: the name of the layer.
            units, options: as for `Dense`.
            input_shape: (..., channels).
        """
        layer = Dense(units, dtype=self.dtype_policy, name=name, **options)
        if name in self._forms:
            layer = Dense.from_config({**layer.get_config(), **self._forms[name]})
        layer.build(input_shape)
        return layer

    def get_config(self) -> dict[str, Any]:
        inside = internals.flatten_layers(self)[1:]
        found = {
            v.name: _describe_form(v)
            for v in inside
            if isinstance(v, Dense) and v.quantization_mode
        }
        forms = found if inside else self._forms
        return {**super().get_config(), **({"forms": forms} if forms else {})}


def _describe_form(layer: Dense) -> dict[str, Any]:
    """Returns the entries of a dense layer's config that restore its quantization and LoRA."""
    config = layer.get_config()
    names = "dtype", "quantization_config", "lora_rank", "lora_alpha"
    return {name: config[name] for name in names if name in config}


def dequantize_kernel(layer: Any) -> Tensor:
    """Returns the kernel of a quantized layer without adapters, in its compute dtype.

    Args:
        layer: a `Dense` or `EinsumDense` layer, or a convolution of
            `tftpu.models.layers.convolution`.
    """
    if isinstance(layer, keras.layers.Dense):
        return _dequantize(layer, "kernel", layer.units)
    if isinstance(layer, keras.layers.EinsumDense) and layer.quantization_mode == "int4":
        rows = _dequantize(layer, "kernel", layer.kernel_scale.shape[-1])
        return ops.reshape(rows, layer.original_kernel_shape)
    if isinstance(layer, keras.layers.EinsumDense):
        values = ops.cast(internals.find_stored_matrix(layer), "float32")
        return ops.cast(values / internals.read_scale(layer), layer.compute_dtype)
    axis = layer.channel_axes[0]
    return _dequantize(layer, "kernel", layer.kernel_shape[axis], axis)


def dequantize_embeddings(layer: keras.layers.Embedding) -> Tensor:
    """Returns the matrix of a quantized embedding without adapters, in its compute dtype."""
    return _dequantize(layer, "embeddings", layer.output_dim)


def read_embeddings(layer: keras.layers.Embedding) -> Tensor:
    """Returns the matrix of an embedding, (tokens, width), dequantized and with its adapters."""
    private: Any = layer
    if layer.quantization_mode is None:
        return ops.convert_to_tensor(layer.embeddings)
    matrix = dequantize_embeddings(layer)
    if not layer.lora_enabled:
        return matrix
    scale = private.lora_alpha / private.lora_rank
    return matrix + scale * ops.matmul(private.lora_embeddings_a, private.lora_embeddings_b)


def _dequantize(layer: Any, name: str, columns: int, packed: int = -1) -> Tensor:
    """Returns a quantized matrix in the layer's compute dtype, computed in float32.

    Args:
        layer: a layer quantized to int8, or to int4 with scales per channel or per group.
        name: "embeddings", which have scales by row, or "kernel", which has scales by its last
            dimensions.
        columns: the size of the dimension `packed` before two 4-bit integers are packed into a
            byte.
        packed: the dimension in which the integers are packed.
    """
    values = ops.convert_to_tensor(internals.find_stored_matrix(layer))
    if layer.quantization_mode == "int4":
        values = quantizers.unpack_int4(values, columns, axis=packed)
    values = ops.cast(values, "float32")
    scale = ops.cast(getattr(layer, f"{name}_scale"), "float32")
    by_row = name == "embeddings"
    zero = getattr(layer, f"{name}_zero", None)
    if zero is None:
        found = values / (scale[:, None] if by_row else scale)
    else:
        groups, axis = ops.cast(layer.g_idx, "int32"), -1 if by_row else 0
        zeros = ops.take(ops.cast(zero, "float32"), groups, axis=axis)
        found = (values - zeros) * ops.take(scale, groups, axis=axis)
    return ops.cast(found, layer.compute_dtype)
