"""Learning rate over the run: scaling with the global batch, warm-up, decay."""

import math

import keras
from keras import ops

from tftpu.config import Optimizer


def peak_rate(config: Optimizer, global_batch_size: int) -> float:
    """The learning rate after warm-up.

    "linear" follows Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), "sqrt" Krizhevsky 2014
    (https://arxiv.org/abs/1404.5997): the configured rate holds at `base_batch_size` examples a step.
    """
    ratio = global_batch_size / config.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scaling]
    return config.learning_rate * factor


@keras.saving.register_keras_serializable("tftpu")
class WarmupDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up from 0 to the peak, then a decay to `end_factor` of it at the last step.

    Args:
        peak: learning rate at the end of the warm-up.
        steps: steps of the whole run.
        warmup_steps: steps of the warm-up.
        decay: "constant", "cosine" (Loshchilov & Hutter 2016), "linear", "polynomial" (of
            `power`), or "step": times `rate` at each of `boundaries`.
        end_factor: of the peak, where cosine, linear and polynomial end.
        power: of the polynomial.
        boundaries, rate: of the decay in steps.
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

    def __call__(self, step):
        step = ops.cast(step, "float32")
        warm = step / max(self.warmup_steps, 1)
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        done = ops.clip(done, 0.0, 1.0)
        factor = self._factor(done, step)
        return self.peak * ops.where(step < self.warmup_steps, warm, factor)

    def _factor(self, done, step):
        """The share of the peak, `done` of the way from the end of warm-up to the last step."""
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

    def get_config(self):
        names = ("peak", "steps", "warmup_steps", "decay", "end_factor", "power")
        return {n: getattr(self, n) for n in (*names, "boundaries", "rate")}


def schedule(config: Optimizer, global_batch_size: int, steps: int) -> WarmupDecay:
    """The schedule of an experiment's optimizer."""
    return WarmupDecay(
        peak_rate(config, global_batch_size),
        steps,
        config.warmup_steps,
        config.decay,
        config.end_factor,
        config.decay_power,
        config.decay_steps,
        config.decay_rate,
    )
