"""A part of a model that is computed again in the backward pass, instead of being kept."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tftpu.models.kernels import internals
from tftpu.tpu import target


def recomputed(part: Callable, variables: list[keras.Variable], x: Any) -> Any:
    """`part(x)`, of which the backward pass keeps x alone (Chen et al. 2016).

    Follows https://arxiv.org/abs/1604.06174. Numbers are the same: random layers draw again what
    they drew, and batch statistics move once.

    Args:
        part: calls layers on one tensor, and gives one.
        variables: of these layers, all of them.
        x: a tensor of floats.
    """
    trained = [v for v in variables if v.trainable]
    others = [v for v in variables if not v.trainable]
    # A scope of variables hides the scope around it: their values are handed in.
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
            return tape.gradient(y, [again, *weights], upstream)

        return forward(x, weights), gradient

    y, *values = run(x, *(tf.convert_to_tensor(v) for v in trained))
    for variable, value in zip(changed, values):
        variable.assign(value)
    return y


def _after(x: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
    """Both as they are, but nothing computed from them can be found before `upstream` is known.

    Else a compiler would see that the same is computed twice, and keep the first.
    """
    if target.platform() == "tpu":
        return internals.optimization_barrier(x, upstream)
    with tf.control_dependencies([upstream]):
        return [tf.identity(x), upstream]
