"""The objectives of a step, each with its losses, variables and optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.losses import Losses
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.objectives.own import ComputedLoss, FunctionLosses, has_own_compute_loss
from tftpu.errors import UserError
from tftpu.tensors import Nest


class ParameterGroup(NamedTuple):
    """One objective of a step, with its losses, variables and optimizer.

    Attributes:
        name: the name of the objective; "" if it is the only one.
        losses: the losses of the objective.
        variables: the variables that the objective trains.
        optimizer: the optimizer of the variables, without a loss-scaling wrapper.
        scaler: the wrapper with a dynamic loss scale; None if there is none.
        every: the number of steps from one update to the next.
        owner: the index of the first objective with this optimizer.
        simultaneous: whether the gradients are those at the beginning of the step.
    """

    name: str
    losses: Losses
    variables: list[keras.Variable]
    optimizer: Any
    scaler: Any
    every: int
    owner: int = 0
    simultaneous: bool = False


def build_compiled_group(model: keras.Model) -> ParameterGroup:
    """Returns the compiled loss of a built model as the only objective."""
    compiled = CompiledLosses(model)
    losses = ComputedLoss(model, compiled) if has_own_compute_loss(model) else compiled
    return ParameterGroup(
        "", losses, model.trainable_variables, *_unwrap_optimizer(model.optimizer), 1
    )


def build_parameter_groups(
    model: keras.Model, objectives: Sequence[Objective], batch: Nest
) -> list[ParameterGroup]:
    """Returns a group for each objective; builds the model and the optimizers."""
    several = len(objectives) > 1
    losses = [FunctionLosses(model, one, several, batch) for one in objectives]
    known = {id(v) for v in model.trainable_variables}
    variables = [_find_variables(model, one) for one in objectives]
    for one, own in zip(objectives, variables):
        for variable in own:
            if id(variable) not in known:
                raise UserError(
                    f"The objective {one.name!r} trains {variable.path!r}, which is not a "
                    "trainable variable of the model given to Trainer: make its layer an "
                    "attribute of the model, so that it is saved with it."
                )
    optimizers: list[Any] = [keras.optimizers.get(one.optimizer) for one in objectives]
    owners = [optimizers.index(optimizer) for optimizer in optimizers]
    for owner in sorted({*owners}):
        shared = [v for own, number in zip(variables, owners) if number == owner for v in own]
        optimizers[owner].build(list({id(v): v for v in shared}.values()))
    return [
        ParameterGroup(
            one.name if several else "",
            found,
            own,
            *_unwrap_optimizer(optimizers[owner]),
            every=one.every,
            owner=owner,
            simultaneous=one.simultaneous,
        )
        for one, found, own, owner in zip(objectives, losses, variables, owners)
    ]


def _find_variables(model: keras.Model, objective: Objective) -> list[keras.Variable]:
    chosen = objective.variables
    if chosen is None:
        return model.trainable_variables
    found = []
    for item in [chosen] if isinstance(chosen, keras.Layer) else chosen:
        found += item.trainable_variables if isinstance(item, keras.Layer) else [item]
    found = list({id(v): v for v in found}.values())
    if not found:
        raise UserError(f"The objective {objective.name!r} has no trainable variables.")
    return found


def _unwrap_optimizer(optimizer: Any) -> tuple[Any, Any]:
    """Returns an optimizer without its loss-scaling wrapper, and the wrapper or None."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer, optimizer
    return optimizer, None
