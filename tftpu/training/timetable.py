"""The steps at which something is due in a run: a log line, an evaluation, a checkpoint."""

import dataclasses
import math

from tftpu.config import TrainOptions, profile_plan
from tftpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The length of a run, and the steps at which its device loops stop.

    Attributes:
        options: how often things are due.
        steps: total length of the run.
        epoch_steps: steps between two evaluations.
        first_step: steps before this one count as done.
        last_alone: whether the last step of an epoch is its own device loop.
    """

    options: TrainOptions
    steps: int
    epoch_steps: int
    first_step: int = 0
    last_alone: bool = False

    @property
    def epochs(self) -> int:
        """The number of epochs; the last one may be shorter."""
        return math.ceil(self.steps / self.epoch_steps)

    def next_stop(self, step: int, boundaries: tuple[int, ...] = ()) -> int:
        """Returns the step that the next device loop ends at: the first where anything is due.

        Args:
            step: steps done.
            boundaries: further steps to stop at.
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

    def left_of_epoch(self, step: int) -> int:
        """Returns the number of steps from a step to the end of its epoch."""
        return min(self.steps, (step // self.epoch_steps + 1) * self.epoch_steps) - step

    def log_due(self, step: int) -> bool:
        """Returns whether a line of metrics is due after a step."""
        return step % self.options.log_every == 0

    def evaluation_due(self, step: int) -> bool:
        """Returns whether an epoch ends with a step."""
        return step % self.epoch_steps == 0

    def checkpoint_due(self, step: int, seconds_since: float) -> bool:
        """Returns whether a checkpoint is due after a step.

        Args:
            step: steps done.
            seconds_since: seconds since the last checkpoint.
        """
        every, minutes = self.options.checkpoint_every, self.options.checkpoint_minutes
        return bool(every and step % every == 0) or bool(minutes and seconds_since >= 60 * minutes)


def refuse_late_profile(profile: str, steps: int) -> None:
    """Raises `UserError` if the steps to profile begin after the last step of a run."""
    for first, last in profile_plan(profile).windows:
        if first >= steps:
            raise UserError(
                f"profile={first}:{last} begins after the last of the run's {steps} steps."
            )
