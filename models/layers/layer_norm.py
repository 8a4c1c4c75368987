"""Layer normalisation with its gradient written out."""

from typing import Any

import keras

from tftpu.tensors import Tensor, ops


@keras.saving.register_keras_serializable("tftpu")
class LayerNormalization(keras.layers.LayerNormalization):
    """Keras's layer for the last axis only (Ba et al. 2016, https://arxiv.org/abs/1607.06450).

    Value and gradient are computed in float32 and rounded once. Backends derive the gradient of
    Keras's layer from several operations, which XLA divides into more passes over the tokens.

    Args:
        epsilon: added to the variance.
    """

    def __init__(
        self,
        epsilon: float,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ):
        super().__init__(epsilon=epsilon, name=name, trainable=trainable, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {key: config[key] for key in ("epsilon", "name", "trainable", "dtype")}

    def call(self, inputs: Tensor) -> Tensor:
        """Normalises (batch, ..., width)."""
        return ops.cast(_normalize(inputs, self.gamma, self.beta, self.epsilon), self.compute_dtype)


def _normalize(x: Tensor, gamma: Any, beta: Any, epsilon: float) -> Tensor:
    outer = tuple(range(len(x.shape) - 1))

    @ops.custom_gradient
    def normalize(x, gamma, beta):
        centred = ops.cast(x, "float32")
        mean = ops.mean(centred, -1, keepdims=True)
        centred = centred - mean
        inverse = ops.rsqrt(ops.mean(ops.square(centred), -1, keepdims=True) + epsilon)

        def gradient(upstream):
            d_y = ops.cast(upstream, "float32")
            unit = (ops.cast(x, "float32") - mean) * inverse
            d_unit = d_y * gamma
            along = ops.mean(d_unit * unit, -1, keepdims=True)
            d_x = inverse * (d_unit - ops.mean(d_unit, -1, keepdims=True) - unit * along)
            return ops.cast(d_x, x.dtype), ops.sum(d_y * unit, outer), ops.sum(d_y, outer)

        return ops.cast(centred * inverse * gamma + beta, x.dtype), gradient

    # Converts to tensors, because TensorFlow's custom gradients treat variables specially.
    return normalize(x, ops.reshape(gamma, (-1,)), ops.reshape(beta, (-1,)))
