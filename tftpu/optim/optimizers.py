"""Optimizers by name: Keras's own, and LARS, which Keras lacks."""

import logging
import re
from typing import Any

import keras

from tftpu.config import OPTIMIZERS, OptimizerConfig
from tftpu.errors import UserError, did_you_mean
from tftpu.optim.schedules import build_schedule
from tftpu.tensors import Tensor, ops

_log = logging.getLogger(__name__)

# Pattern of the names of variables without weight decay: biases, and the scales and shifts of
# normalization layers. Keras and `LARS` search for it in a variable's name.
NO_DECAY = r"(^|/)(bias|gamma|beta|scale)(:\d+)?$"


def build(
    config: OptimizerConfig | str, global_batch_size: int, steps: int
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of an experiment.

    Args:
        config: name and hyper-parameters of the optimizer. If it is a name alone, the optimizer's
            default hyper-parameters and a constant learning rate are used.
        global_batch_size: examples per step; `config.scaling` may scale the learning rate by it.
        steps: the number of steps of the whole run; the learning rate's decay ends with them.

    Raises:
        UserError: an unknown name.
    """
    name = (config if isinstance(config, str) else config.name).lower()
    if name not in OPTIMIZERS:
        raise UserError(f"There is no optimizer {name!r}.{did_you_mean(name, OPTIMIZERS)}")
    if isinstance(config, str):
        # Keras does not find Lamb by its name, and lacks LARS.
        own = {"lamb": keras.optimizers.Lamb, "lars": LARS}
        return own[name]() if name in own else keras.optimizers.get(name)
    if 0 < steps <= config.warmup_steps:
        _log.warning(
            "The run ends after %d steps, before the end of its warmup of %d steps "
            "(optimizer.warmup_steps).",
            steps,
            config.warmup_steps,
        )
    # Keras annotates learning rates as float, but also accepts schedules.
    rate: Any = build_schedule(config, global_batch_size, steps)
    decay: Any = config.weight_decay or None
    kinds = keras.optimizers
    make = {
        "adadelta": lambda: kinds.Adadelta(rate, weight_decay=decay),
        "adafactor": lambda: kinds.Adafactor(rate, weight_decay=decay),
        "adagrad": lambda: kinds.Adagrad(rate, weight_decay=decay),
        "adam": lambda: kinds.Adam(rate, weight_decay=decay, beta_2=config.beta_2),
        "adamax": lambda: kinds.Adamax(rate, weight_decay=decay, beta_2=config.beta_2),
        "adamw": lambda: kinds.AdamW(rate, weight_decay=config.weight_decay, beta_2=config.beta_2),
        "lamb": lambda: kinds.Lamb(rate, weight_decay=decay, beta_2=config.beta_2),
        "lars": lambda: LARS(
            rate, momentum=config.momentum, trust_weight_decay=config.weight_decay
        ),
        "lion": lambda: kinds.Lion(rate, weight_decay=decay, beta_2=config.beta_2),
        "muon": lambda: kinds.Muon(rate, weight_decay=config.weight_decay),
        "rmsprop": lambda: kinds.RMSprop(rate, weight_decay=decay),
        "sgd": lambda: kinds.SGD(
            rate, momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay
        ),
    }
    optimizer = make[name]()
    optimizer.exclude_from_weight_decay(var_names=[NO_DECAY])
    return optimizer


@keras.saving.register_keras_serializable("tftpu")
class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling, for very large batches of images.

    Follows You et al. 2017, https://arxiv.org/abs/1708.03888. The norm of a weight's step is about
    `lr trust` times the norm of the weight: `v <- momentum v + lr trust |w| / (|g| + decay |w|)
    (g + decay w)`, `w <- w - v`. For biases and normalization layers, `v <- momentum v + lr g`.

    Args:
        learning_rate: a number or a schedule.
        momentum: momentum of the update.
        trust: the paper's eta.
        trust_weight_decay: L2 penalty, inside the trust ratio as in the paper (not decoupled).
        name: name of the optimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        trust: float = 0.001,
        trust_weight_decay: float = 0.0,
        name: str = "lars",
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.trust = trust
        self.trust_weight_decay = trust_weight_decay

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the momentum of each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Tensor, variable: Tensor, learning_rate: Tensor) -> None:
        """Updates one variable, given the gradient with respect to it."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        momentum = self._momentums[self._get_variable_index(variable)]
        if not re.search(NO_DECAY, variable.name):
            decay = self.trust_weight_decay
            weight_norm = ops.sqrt(ops.sum(ops.square(variable)))
            grad_norm = ops.sqrt(ops.sum(ops.square(gradient)))
            both = ops.logical_and(weight_norm > 0, grad_norm > 0)
            ratio = self.trust * weight_norm / (grad_norm + decay * weight_norm + 1e-30)
            gradient = ops.where(both, ratio, 1.0) * (gradient + decay * variable)
        self.assign(momentum, self.momentum * momentum + rate * gradient)
        self.assign_sub(variable, momentum)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "trust": self.trust,
            "trust_weight_decay": self.trust_weight_decay,
        }
