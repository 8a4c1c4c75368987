"""The steps at which something is due in a run: a log line, an evaluation, a checkpoint."""

import dataclasses
import math

from tftpu.config import TrainOptions
from tftpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The length of a run, and the steps at which its device loops stop.

    Attributes:
        options: how often things are due.
        steps: total length of the run.
        epoch_steps: steps between two evaluations.

    Raises:
        UserError: a length that is not a whole number above 0.
    """

    options: TrainOptions
    steps: int
    epoch_steps: int

    @classmethod
    def of(cls, options: TrainOptions, steps: int, eval_every: int | None) -> "Timetable":
        """Returns the timetable of a call of `fit`; `eval_every` None: only at the end."""
        if steps < 1 or steps != int(steps):
            raise UserError(f"steps is {steps}: it must be a whole number, 1 or more.")
        if eval_every is not None and eval_every < 1:
            raise UserError(f"eval_every is {eval_every}: it must be 1 or more, or None.")
        return cls(options, int(steps), eval_every or int(steps))

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
        return min(self.steps, *stops)

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
