"""The length of a run, and the steps at which a log line, an evaluation or a checkpoint is due."""

import dataclasses
import math

from tftpu.config import TrainConfig, profile_plan
from tftpu.engines.engine import Epoch
from tftpu.errors import UserError
from tftpu.training.arguments import check_whole_number


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The length of a run, and the steps at which its device loops stop.

    Attributes:
        options: how often things are due.
        steps: the total length of the run.
        epoch_steps: the number of steps between two evaluations.
        first_step: the first step of the run; steps before it count as done.
        last_alone: whether the last step of an epoch is its own device loop.
    """

    options: TrainConfig
    steps: int
    epoch_steps: int
    first_step: int = 0
    last_alone: bool = False

    @property
    def epochs(self) -> int:
        """The number of epochs; the last one may be shorter."""
        return math.ceil(self.steps / self.epoch_steps)

    def find_next_stop(self, step: int, boundaries: tuple[int, ...] = ()) -> int:
        """Returns the step at which the next device loop ends: the first at which something is due.

        Args:
            step: steps done.
            boundaries: further steps at which to stop.
        """
        options = self.options
        every = (
            options.steps_per_loop,
            options.log_every,
            options.checkpoint_every,
            self.epoch_steps,
        )
        stops = [(step // n + 1) * n for n in every if n]
        stops += [boundary for boundary in boundaries if boundary > step]
        before_last = (step // self.epoch_steps + 1) * self.epoch_steps - 1
        if self.last_alone and before_last > step:
            stops.append(before_last)
        return min(self.steps, *stops)

    def count_left_of_epoch(self, step: int) -> int:
        """Returns the number of steps from a given step to the end of its epoch."""
        return min(self.steps, (step // self.epoch_steps + 1) * self.epoch_steps) - step

    def is_log_due(self, step: int) -> bool:
        """Returns whether a line of metrics is due after a step."""
        return step % self.options.log_every == 0

    def is_evaluation_due(self, step: int) -> bool:
        """Returns whether an epoch ends with the given step."""
        return step % self.epoch_steps == 0

    def is_checkpoint_due(self, step: int, seconds_since: float) -> bool:
        """Returns whether a checkpoint is due after a step.

        Args:
            step: steps done.
            seconds_since: seconds since the last checkpoint.
        """
        every, minutes = self.options.checkpoint_every, self.options.checkpoint_minutes
        return bool(every and step % every == 0) or bool(minutes and seconds_since >= 60 * minutes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run, as the caller wrote it.

    Attributes:
        epochs: the index of the epoch before which the run ends; None: `steps` sets the length, or
            there is one epoch.
        steps: the total length of the run; None: `epochs` sets the length.
        steps_per_epoch: the number of steps in an epoch; None: an epoch is one pass over the data.
        initial_epoch: the index of the epoch with which the run begins.
        eval_every: the number of steps between two evaluations, if `steps` is given.

    Raises:
        UserError: arguments contradict each other, or are not whole numbers in their range.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None
    initial_epoch: int
    eval_every: int | None

    def __post_init__(self) -> None:
        for name, least in (
            *(("epochs", 1), ("steps", 1), ("steps_per_epoch", 1)),
            *(("initial_epoch", 0), ("eval_every", 1)),
        ):
            check_whole_number(name, getattr(self, name), least)
        if self.steps is None:
            if self.eval_every is not None:
                raise UserError(
                    "eval_every works only with steps=. With epochs=, an evaluation follows each "
                    "epoch, and steps_per_epoch= sets the length of an epoch."
                )
            return
        if self.epochs is not None:
            raise UserError(
                f"epochs={self.epochs} and steps={self.steps} both set the length of the run: "
                "pass only one of them."
            )
        if self.steps_per_epoch is not None:
            raise UserError(
                "steps_per_epoch works only with epochs=. steps= is the total length of the run; "
                "with it, eval_every= sets the number of steps between two evaluations."
            )
        if self.initial_epoch:
            raise UserError("initial_epoch works only with epochs=: leave it out with steps=.")

    @property
    def whole_epochs(self) -> bool:
        """True if an epoch is one pass over the data."""
        return self.steps is None and self.steps_per_epoch is None

    def build_timetable(self, options: TrainConfig, epoch: Epoch | None) -> Timetable:
        """Returns the timetable of the run.

        Args:
            options: the options of training.
            epoch: the epoch of the data, if `whole_epochs` is True.
        """
        if self.steps is not None:
            return Timetable(options, self.steps, self.eval_every or self.steps)
        each = epoch.steps if epoch is not None else self.steps_per_epoch or 1
        first = self.initial_epoch * each
        alone = epoch is not None and epoch.last is not None
        return Timetable(options, (self.epochs or 1) * each, each, first, alone)


def check_profile(profile: str, steps: int) -> None:
    """Raises `UserError` if the steps to profile begin after the last step of a run."""
    for first, last in profile_plan(profile).windows:
        if first >= steps:
            raise UserError(
                f"profile={first}:{last} begins after the last of the run's {steps} steps."
            )
