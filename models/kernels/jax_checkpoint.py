"""Recomputation in the backward pass, by JAX: as `tftpu.models.layers.recompute` uses it."""

from collections.abc import Callable

import jax
import keras

from tftpu.tensors import Tensor


def checkpoint(
    forward: Callable[..., tuple[Tensor, list[Tensor]]],
    x: Tensor,
    trained: list[keras.Variable],
    others: list[keras.Variable],
) -> tuple[Tensor, list[Tensor]]:
    """Returns `forward(x, weights, states)`, keeping none of its intermediate results.

    Args: as for `tftpu.models.kernels.tensorflow_checkpoint.checkpoint`.
    """
    weights, states = ([v.value for v in variables] for variables in (trained, others))
    return jax.checkpoint(forward)(x, weights, states)
