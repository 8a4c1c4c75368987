"""Learning rate over a run: scaling with the global batch, warmup, decay."""

import math
from typing import Any

import keras

from tftpu.config import OptimizerConfig
from tftpu.tensors import Tensor, ops


def compute_peak_rate(config: OptimizerConfig, global_batch_size: int) -> float:
    """Returns the learning rate after the warmup.

    The scaling "linear" follows Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), "sqrt"
    Krizhevsky 2014 (https://arxiv.org/abs/1404.5997). Both leave the configured learning rate
    unchanged at a global batch of `base_batch_size`; "none" never changes it.
    """
    ratio = global_batch_size / config.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scaling]
    return config.learning_rate * factor


@keras.saving.register_keras_serializable("tftpu")
class WarmupDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup from 0 to a peak, followed by a decay until the last step.

    Args:
        peak: learning rate at the end of the warmup.
        steps: total steps of the run.
        warmup_steps: steps of the warmup.
        decay: "constant", "cosine" (Loshchilov & Hutter 2016), "linear", "polynomial" (with
            exponent `power`), or "step": multiplied by `rate` at each of `boundaries`.
        end_factor: final rate of cosine, linear and polynomial decay, as a fraction of the peak.
        power: exponent of the polynomial decay.
        boundaries, rate: the steps at which "step" multiplies the learning rate, and its factor.
    """

    def __init__(
        self,
        peak: float,
        steps: int,
        warmup_steps: int = 0,
        decay: str = "cosine",
        end_factor: float = 0.0,
        power: float = 2.0,
        boundaries: tuple[int, ...] = (),
        rate: float = 0.1,
    ):
        self.peak = peak
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.end_factor = end_factor
        self.power = power
        self.boundaries = tuple(boundaries)
        self.rate = rate

    def __call__(self, step: Tensor) -> Tensor:
        """Returns the learning rate, () float32, after `step` steps."""
        step = ops.cast(step, "float32")
        warm = step / max(self.warmup_steps, 1)
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        done = ops.clip(done, 0.0, 1.0)
        factor = self._compute_factor(done, step)
        return self.peak * ops.where(step < self.warmup_steps, warm, factor)

    def _compute_factor(self, done: Tensor, step: Tensor) -> Tensor:
        """Returns the decay factor by which the peak is multiplied.

        Args:
            done: the elapsed fraction of the steps after the warmup, in [0, 1], () float32.
            step: the number of steps done, () float32.
        """
        if self.decay == "constant":
            return ops.ones_like(done)
        if self.decay == "step":
            passed = sum(ops.cast(step >= boundary, "float32") for boundary in self.boundaries)
            return ops.power(self.rate, passed)
        left = {
            "cosine": lambda: 0.5 * (1.0 + ops.cos(math.pi * done)),
            "linear": lambda: 1.0 - done,
            "polynomial": lambda: ops.power(1.0 - done, self.power),
        }[self.decay]()
        return self.end_factor + (1.0 - self.end_factor) * left

    def get_config(self) -> dict[str, Any]:
        names = ("peak", "steps", "warmup_steps", "decay", "end_factor", "power")
        return {n: getattr(self, n) for n in (*names, "boundaries", "rate")}


def build_schedule(config: OptimizerConfig, global_batch_size: int, steps: int) -> WarmupDecay:
    """Returns the schedule of an experiment's optimizer."""
    return WarmupDecay(
        compute_peak_rate(config, global_batch_size),
        steps,
        config.warmup_steps,
        config.decay,
        config.end_factor,
        config.decay_power,
        config.decay_steps,
        config.decay_rate,
    )
