"""The update of the variables of an objective, as a function of their values."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import keras

from tftpu.engines import keras_internals
from tftpu.engines.objectives.parameter_groups import ParameterGroup

Arrays = list[Any]  # a list of jax.Array


class UpdateResult(NamedTuple):
    """The values after an update.

    Attributes:
        variables: the values of the objective's variables.
        optimizer: the values of its optimizer's variables.
    """

    variables: Arrays
    optimizer: Arrays


def apply_gradients(
    group: ParameterGroup, grads: Arrays, reached: list[bool], variables: Arrays, optimizer: Arrays
) -> UpdateResult:
    """Returns the values of an objective's and its optimizer's variables after an update.

    Args:
        group: the objective.
        grads: the gradient with respect to each of the objective's variables.
        reached: whether the loss depends on each variable; other variables do not change.
        variables: the values of the objective's variables.
        optimizer: the values of its optimizer's variables.
    """
    own: Any = group.optimizer
    mapping = [*zip(group.variables, variables), *zip(own.variables, optimizer)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        used = [(grad, v) for grad, v, reaches in zip(grads, group.variables, reached) if reaches]
        clipped = keras_internals.clip(own, [grad for grad, _ in used])
        rate = own.learning_rate
        keras_internals.apply_weight_decay(own, [variable for _, variable in used])
        for grad, (_, variable) in zip(clipped, used):
            own.update_step(grad, variable, rate)
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable.value))
        own.iterations.assign_add(1)
        return UpdateResult(
            [scope.get_current_value(v) for v in group.variables],
            [scope.get_current_value(v) for v in own.variables],
        )


def adjust_loss_scale(group: ParameterGroup, scale: Arrays, finite: Any) -> Arrays:
    """Returns the dynamic loss scale after a step.

    The factor is halved after an overflow, to 1 at least, and doubled after enough steps without.

    Args:
        group: the objective.
        scale: the factor, (), and the number of steps since it changed, ().
        finite: whether the gradients of this step were finite, () bool.
    """
    factor, count = scale
    good = jnp.where(finite, count + 1, 0)
    grow = good >= group.scaler.dynamic_growth_steps
    grown = jnp.where(grow, factor * 2.0, factor)
    return [
        jnp.where(finite, grown, jnp.maximum(factor / 2.0, 1.0)),
        jnp.where(grow, 0, good).astype(count.dtype),
    ]


def compute_global_norm(tensors: Arrays) -> Any:
    """Returns the square root of the sum of squares over all tensors, () float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(t.astype("float32"))) for t in tensors))
