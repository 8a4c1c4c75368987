"""Recomputation in the backward pass by TensorFlow, for `tftpu.models.blocks.recompute`."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tftpu import sharding
from tftpu.models.kernels import internals
from tftpu.tensors import Tensor


def checkpoint(
    forward: Callable[..., tuple[Tensor, list[Tensor]]],
    x: Tensor,
    trained: list[keras.Variable],
    others: list[keras.Variable],
) -> tuple[Tensor, list[Tensor]]:
    """Returns `forward(x, weights, states)`, keeping none of its intermediate results.

    Args:
        forward: a pure function, whose first result has a gradient.
        x: a float tensor.
        trained: the variables whose values are `weights`.
        others: the variables whose values are `states`, constants to the gradient.
    """
    # The scope inside `forward` hides the enclosing scope, so current values are passed in.
    states = [tf.convert_to_tensor(v) for v in others]

    @tf.custom_gradient
    def run(x, *weights):
        def gradient(upstream, *_):
            again, upstream = _wait_for(x, upstream)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again, *weights])
                y, _ = forward(again, weights, states)
            return tape.gradient([y], [again, *weights], [upstream])

        y, values = forward(x, weights, states)
        return [y, *values], gradient

    y, *values = run(x, *(tf.convert_to_tensor(v) for v in trained))
    return y, values


def _wait_for(x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Returns both unchanged, but makes their uses wait for `upstream`.

    Otherwise a compiler would merge the two computations and keep the first result.
    """
    if sharding.get_platform() == "tpu":
        return internals.optimization_barrier(x, upstream)
    with tf.control_dependencies([upstream]):
        return [tf.identity(x), upstream]
