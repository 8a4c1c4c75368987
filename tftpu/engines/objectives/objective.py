"""`Objective`: a loss function with the variables that it trains and their optimizer."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tftpu.config.validation import at_least
from tftpu.errors import UserError, did_you_mean
from tftpu.tensors import Nest, Tensor

# Maps (model, batch, training) to a loss, or to (loss, {name: value}).
LossFunction = Callable[[Any, Nest, bool], Tensor | tuple[Tensor, dict[str, Tensor]]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss function with the variables that it trains and their optimizer.

    A step of `Trainer(model, objectives=[...])` runs the objectives in order. Each sees the updates
    of earlier objectives, unless it is `simultaneous`. An optimizer that several objectives
    share counts one iteration for each.

    Args:
        loss_fn: `loss_fn(model, batch, training)` returns the loss of each example, (batch, ...),
            and optionally a dictionary of further values for each example that are logged.
        variables: the variables that the loss trains: a layer (its trainable variables), a list of
            layers, built or not, or a list of variables. None: all of the model.
        optimizer: a Keras optimizer or its name, with its own clipping and loss scale.
        every: the number of steps from one update to the next; the first update is at the first
            step.
        name: the name in logs and checkpoints; "" takes that of `loss_fn`, without "_loss".
        simultaneous: whether the gradients are those at the beginning of the step, before the
            updates of earlier objectives.
        regularize: whether `model.losses` are added to the loss: the regularizers of weights, and
            losses that layers add with `add_loss`.

    Raises:
        UserError: an argument has a wrong type, `loss_fn` does not take three arguments, `every` is
            not positive, Keras does not know the optimizer, or the name contains characters other
            than letters, digits and underscores.

    Example:

    ```python
    objectives = [
        tftpu.Objective(critic_loss, variables=gan.critic, optimizer="adam"),
        tftpu.Objective(generator_loss, variables=gan.generator, optimizer="adam", every=5),
    ]
    trainer = tftpu.Trainer(gan, "runs/gan", objectives=objectives)
    ```
    """

    loss_fn: LossFunction
    variables: keras.Layer | Sequence[keras.Layer | keras.Variable] | None
    optimizer: keras.optimizers.Optimizer | str
    every: int = 1
    name: str = ""
    simultaneous: bool = False
    regularize: bool = True

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise UserError(
                f"loss_fn is a {type(self.loss_fn).__name__}: pass a function of (model, batch, "
                "training) that returns the loss of each example, of shape (batch,)."
            )
        _refuse_other_parameters(self.loss_fn)
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise UserError(f"Objective.every is {self.every!r}: it must be a whole number.")
        at_least("Objective.every", self.every, 1)
        _refuse_other_variables(self.variables)
        _refuse_other_optimizer(self.optimizer)
        if not isinstance(self.name, str) or not re.fullmatch(r"\w*", self.name):
            raise UserError(
                f"Objective.name is {self.name!r}, but it becomes part of file names in "
                "checkpoints: use letters, digits and underscores."
            )
        if not self.name:
            name = getattr(self.loss_fn, "__name__", "objective").removesuffix("_loss")
            object.__setattr__(self, "name", name if name != "<lambda>" else "objective")


def list_objectives(
    model: keras.Model, loss_fn: LossFunction | None, objectives: Sequence[Objective]
) -> tuple[Objective, ...]:
    """Returns the objectives given to a trainer; empty if it is to use the model's compiled loss.

    Args:
        model: the model, compiled with an optimizer if there is a `loss_fn`.
        loss_fn: the loss function of the only objective.
        objectives: several objectives.

    Raises:
        UserError: both `loss_fn` and `objectives` are given, the model has no optimizer for
            `loss_fn`, or `objectives` is not a list of objectives with different names.
    """
    if loss_fn is not None and objectives:
        raise UserError("Trainer takes either loss_fn or objectives, not both.")
    if loss_fn is not None:
        if getattr(model, "optimizer", None) is None:
            raise UserError(
                "loss_fn needs an optimizer: call model.compile(optimizer=...) before making a "
                "Trainer."
            )
        return (Objective(loss_fn, None, model.optimizer),)
    if isinstance(objectives, Objective):
        raise UserError(
            "objectives is a single Objective: pass a list, objectives=[Objective(...)]."
        )
    for one in objectives:
        if not isinstance(one, Objective):
            raise UserError(
                f"objectives holds a {type(one).__name__}: each item must be a "
                "tftpu.Objective(loss_fn, variables, optimizer). For a single loss function, use "
                "Trainer(model, loss_fn=...)."
            )
    names = [one.name for one in objectives]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"Two objectives have the name {name!r}: give each its own name, "
                "Objective(name=...)."
            )
    return tuple(objectives)


def _refuse_other_parameters(loss_fn: LossFunction) -> None:
    """Raises `UserError` for a function that does not take (model, batch, training)."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # Python cannot inspect the function's signature
        return
    try:
        signature.bind(None, None, True)
    except TypeError as error:
        raise UserError(
            f"The loss function takes {signature}, but it is called with (model, batch, "
            "training): give it these three parameters."
        ) from error


def _refuse_other_variables(variables: Any) -> None:
    """Raises `UserError` unless variables are a layer, a list of layers or variables, or None."""
    if variables is None or isinstance(variables, keras.Layer):
        return
    if isinstance(variables, list | tuple) and all(
        isinstance(one, keras.Layer | keras.Variable) for one in variables
    ):
        return
    given = f"the text {variables!r}" if isinstance(variables, str) else type(variables).__name__
    raise UserError(
        f"Objective.variables is {given}: pass a layer, such as model.critic, a list of layers or "
        "variables, or None for all variables of the model."
    )


def _refuse_other_optimizer(optimizer: Any) -> None:
    """Raises `UserError` unless an optimizer is a Keras optimizer, or the name of one."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    try:
        if isinstance(optimizer, str):
            keras.optimizers.get(optimizer)
            return
    except ValueError as error:
        names = [name.lower() for name, one in vars(keras.optimizers).items() if _is_one(one)]
        raise UserError(
            f"Objective.optimizer is {optimizer!r}, which Keras does not have."
            f"{did_you_mean(optimizer, names)}"
        ) from error
    raise UserError(
        f"Objective.optimizer is a {type(optimizer).__name__}: pass a Keras optimizer or its name, "
        "such as 'adam'."
    )


def _is_one(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, keras.optimizers.Optimizer)
