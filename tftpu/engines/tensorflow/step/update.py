"""Updates one replica's copy of the variables, with gradients that all replicas share."""

from typing import Any

import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.objectives.parameter_groups import ParameterGroup
from tftpu.engines.tensorflow.state import ModelState
from tftpu.tensors import Tensor


def apply_gradients(group: ParameterGroup, grads: list[Tensor], reached: list[bool]) -> None:
    """Updates the variables of an objective with its optimizer; does not count the iteration.

    Args:
        group: the objective.
        grads: the gradient with respect to each of the objective's variables.
        reached: whether the loss depends on each variable; other variables do not change.
    """
    optimizer = group.optimizer
    used = [(grad, v) for grad, v, reaches in zip(grads, group.variables, reached) if reaches]
    clipped = keras_internals.clip(optimizer, [grad for grad, _ in used])
    rate = tf.convert_to_tensor(optimizer.learning_rate)
    keras_internals.apply_weight_decay(optimizer, [variable for _, variable in used])
    for grad, (_, variable) in zip(clipped, used):
        value = variable.value
        optimizer.update_step(grad, value, rate)
        if variable.constraint is not None:
            value.assign(variable.constraint(tf.convert_to_tensor(value)))


def update_averages(state: ModelState) -> None:
    """Updates the moving averages of the weights, if `ema_momentum` is set."""
    momentum = state.options.ema_momentum
    if momentum is not None:
        for average, variable in zip(state.averages, state.model.trainable_variables):
            average.assign_sub((average - variable.value) * (1.0 - momentum))


def read_loss_scale(group: ParameterGroup) -> Tensor | float | None:
    """Returns the factor to scale an objective's loss by, dynamic or fixed; None if unscaled."""
    if group.scaler is not None:
        return tf.convert_to_tensor(group.scaler.dynamic_scale.value)
    return group.optimizer.loss_scale_factor


def adjust_loss_scale(scaler: Any, finite: Tensor) -> None:
    """Halves a loss scale, to 1 at least, after an overflow; doubles it after enough steps without.

    Args:
        scaler: a `keras.optimizers.LossScaleOptimizer`.
        finite: whether the gradients of this step were finite, () bool.
    """
    scale, count = scaler.dynamic_scale.value, scaler.step_counter.value
    zero = tf.zeros((), count.dtype)
    good = tf.where(finite, count + 1, zero)
    grow = good >= scaler.dynamic_growth_steps
    grown = tf.where(grow, scale * 2.0, scale)
    scale.assign(tf.where(finite, grown, tf.maximum(scale / 2.0, 1.0)))
    count.assign(tf.where(grow, zero, good))
