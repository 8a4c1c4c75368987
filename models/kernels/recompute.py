"""Recomputes parts of a model in the backward pass instead of keeping their activations."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tftpu.models.kernels import internals
from tftpu.tensors import Tensor
from tftpu.tpu import target


def recomputed(
    part: Callable[[Tensor], Tensor], variables: list[keras.Variable], x: Tensor
) -> Tensor:
    """Returns `part(x)`, keeping only x for the backward pass (Chen et al. 2016).

    Follows https://arxiv.org/abs/1604.06174. Numbers do not change: random layers draw the same
    numbers again, and batch statistics are updated once.

    Args:
        part: applies layers to one float tensor and returns one.
        variables: all variables of these layers.
        x: the input of `part`.
    """
    trained = [v for v in variables if v.trainable]
    others = [v for v in variables if not v.trainable]
    # The scope below hides the enclosing one, so current values are passed in.
    states = [tf.convert_to_tensor(v) for v in others]
    changed = []

    def forward(x, weights):
        mapping = [*zip(trained, weights), *zip(others, states)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            before = [scope.get_current_value(v) for v in others]
            y = part(x)
            after = [scope.get_current_value(v) for v in others]
        changed[:] = [v for v, old, new in zip(others, before, after) if new is not old]
        return [y, *(new for old, new in zip(before, after) if new is not old)]

    @tf.custom_gradient
    def run(x, *weights):
        def gradient(upstream, *_):
            again, upstream = _after(x, upstream)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again, *weights])
                y = forward(again, weights)[0]
            return tape.gradient([y], [again, *weights], [upstream])

        return forward(x, weights), gradient

    y, *values = run(x, *(tf.convert_to_tensor(v) for v in trained))
    for variable, value in zip(changed, values):
        variable.assign(value)
    return y


def _after(x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Returns both unchanged, but makes their uses wait for `upstream`.

    Otherwise a compiler would merge the two computations and keep the first result.
    """
    if target.platform() == "tpu":
        return internals.optimization_barrier(x, upstream)
    with tf.control_dependencies([upstream]):
        return [tf.identity(x), upstream]
