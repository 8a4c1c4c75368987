"""The length of a run, and the steps at which a log line, an evaluation or a checkpoint is due."""

import dataclasses
import itertools
import operator
import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

import keras

from tftpu.config import TrainConfig, profile_plan
from tftpu.engines.engine import Epoch
from tftpu.errors import UserError
from tftpu.training.arguments import check_whole_number


class EpochPlace(NamedTuple):
    """The epoch that a step belongs to.

    Attributes:
        number: the index of the epoch.
        first: the number of steps before the epoch.
        length: the number of its steps; None: it lasts until the data end.
    """

    number: int
    first: int
    length: int | None


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The length of a run, and the steps at which its device loops stop.

    Attributes:
        options: the options with the intervals of log lines and checkpoints.
        loop_steps: the maximum number of steps of a device loop.
        epochs: the number of epochs; the last one may be shorter.
        lengths: the numbers of steps of successive epochs, repeated in a cycle; empty: each epoch
            lasts until the data end.
        limit: the total length of the run, in steps; None: all of its epochs.
        first_step: the number of steps that count as done when the run begins.
        pass_steps: the number of steps of one pass over the data; None: unknown, or endless.
        last_alone: whether the last step of a pass runs in a separate device loop.
        numbered_from: the index of the first epoch, if steps of earlier ones are not counted.
        validation_freq: the number of epochs from one evaluation to the next, or the evaluated
            epochs, counted from 1.
        by_epochs: False if `steps` sets the length of the run.
    """

    options: TrainConfig
    loop_steps: int
    epochs: int
    lengths: tuple[int, ...]
    limit: int | None = None
    first_step: int = 0
    pass_steps: int | None = None
    last_alone: bool = False
    numbered_from: int = 0
    validation_freq: int | Collection[int] = 1
    by_epochs: bool = True

    @property
    def steps(self) -> int | None:
        """The total number of steps of the run; None if it depends on data of unknown length."""
        if self.limit is not None or not self.lengths:
            return self.limit
        return self.count_steps(self.epochs)

    @property
    def epoch_steps(self) -> int | None:
        """The steps of the first epoch; None if they are unknown."""
        return self.lengths[0] if self.lengths else None

    def describe_epochs(self) -> list[int]:
        """Returns the steps of the first epoch and of one pass; [] if unknown, or not by epochs."""
        return [self.lengths[0], sum(self.lengths)] if self.by_epochs and self.lengths else []

    def count_steps(self, epochs: int) -> int:
        """Returns the number of steps of this many epochs, from the first on."""
        rounds, rest = divmod(epochs, len(self.lengths))
        return rounds * sum(self.lengths) + sum(self.lengths[:rest])

    def locate(self, step: int) -> EpochPlace:
        """Returns the epoch of the next step, after `step` steps are done."""
        if not self.lengths:
            return EpochPlace(self.numbered_from, 0, None)
        rounds, rest = divmod(step, sum(self.lengths))
        ends = list(itertools.accumulate(self.lengths))
        place = next(i for i, end in enumerate(ends) if rest < end)
        length = self.lengths[place]
        number = rounds * len(self.lengths) + place
        return EpochPlace(self.numbered_from + number, step - rest + ends[place] - length, length)

    def is_over(self, step: int) -> bool:
        """Returns whether all steps of the run are done."""
        return self.steps is not None and step >= self.steps

    def find_next_stop(self, step: int, boundaries: tuple[int, ...] = ()) -> int:
        """Returns the step at which the next device loop ends: the first at which something is due.

        Args:
            step: the number of steps that are done.
            boundaries: further steps at which to stop.
        """
        options, epoch = self.options, self.locate(step)
        every = (options.log_every, options.checkpoint_every)
        stops = [(step // n + 1) * n for n in every if n]
        loops = (step - epoch.first) // self.loop_steps + 1
        stops.append(epoch.first + loops * self.loop_steps)
        stops += [boundary for boundary in boundaries if boundary > step]
        if epoch.length is not None:
            stops.append(epoch.first + epoch.length)
        if self.last_alone and self.pass_steps is not None:
            before_last = (step // self.pass_steps + 1) * self.pass_steps - 1
            stops += [before_last] if before_last > step else []
        return min(stops if self.steps is None else [self.steps, *stops])

    def count_left_of_epoch(self, step: int) -> int:
        """Returns the steps left in the epoch; if its length is unknown, in the device loop."""
        epoch = self.locate(step)
        if epoch.length is None:
            return self.find_next_stop(step) - step
        end = epoch.first + epoch.length
        return (end if self.steps is None else min(self.steps, end)) - step

    def is_log_due(self, step: int) -> bool:
        """Returns whether a line of metrics is due after a step."""
        return step % self.options.log_every == 0

    def is_evaluation_due(self, step: int) -> bool:
        """Returns whether an epoch ends with the given step; False if its length is unknown."""
        return bool(self.lengths) and self.locate(step).first == step

    def is_validated(self, epoch: int) -> bool:
        """Returns whether an evaluation follows the epoch with this index."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    def is_checkpoint_due(self, step: int, seconds_since: float) -> bool:
        """Returns whether a checkpoint is due after a step.

        Args:
            step: steps done.
            seconds_since: seconds since the last checkpoint.
        """
        every, minutes = self.options.checkpoint_every, self.options.checkpoint_minutes
        return bool(every and step % every == 0) or bool(minutes and seconds_since >= 60 * minutes)

    def end_data(self, step: int, again: bool) -> "Timetable":
        """Returns the timetable after the first pass over data of unknown length.

        Args:
            step: the number of steps of the pass.
            again: whether the data can begin again; otherwise the run is over.
        """
        if self.limit is not None:  # a length given as steps= does not depend on the data
            return dataclasses.replace(self, pass_steps=step)
        lengths = divide_pass(self.epoch_steps, step)
        found = dataclasses.replace(self, lengths=lengths, pass_steps=step)
        return found if again else dataclasses.replace(found, limit=step)


def divide_pass(steps_per_epoch: int | None, steps: int) -> tuple[int, ...]:
    """Returns the lengths of the epochs of one pass over the data, as in Keras.

    The last epoch ends with the data, even if it has fewer than `steps_per_epoch` steps.
    """
    if steps_per_epoch is None or steps_per_epoch >= steps:
        return (steps,)
    full, rest = divmod(steps, steps_per_epoch)
    return (steps_per_epoch,) * full + ((rest,) if rest else ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run, as given to `fit`.

    Attributes:
        epochs: the number of epochs, including those before `initial_epoch`; None: `steps` sets the
            length, or there is one epoch.
        steps: the total number of steps of the run; None: `epochs` sets the length.
        steps_per_epoch: the maximum steps of an epoch; None: an epoch is one pass over the data.
        initial_epoch: the index of the epoch with which the run begins.
        eval_every: the number of steps between two evaluations, if `steps` is given.
        validation_freq: see `Timetable`.

    Raises:
        UserError: arguments contradict each other, or are not whole numbers in their range.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None
    initial_epoch: int
    eval_every: int | None
    validation_freq: int | Collection[int]

    def __post_init__(self) -> None:
        for name, least in (
            *(("epochs", 1), ("steps", 1), ("steps_per_epoch", 1)),
            *(("initial_epoch", 0), ("eval_every", 1)),
        ):
            self._check_whole_number(name, least)
        if not isinstance(self.validation_freq, list | tuple | set | frozenset):
            self._check_whole_number("validation_freq", 1)
            if self.validation_freq is None:
                raise UserError("validation_freq is None: give a number of epochs, or a list.")
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
        if self.validation_freq != 1:
            raise UserError(
                "validation_freq works only with epochs=. With steps=, eval_every= sets the number "
                "of steps between two evaluations."
            )

    def _check_whole_number(self, name: str, least: int) -> None:
        """Checks a field; turns a number of NumPy's, which JSON does not hold, into an `int`."""
        value: Any = getattr(self, name)
        check_whole_number(name, value, least)
        if value is not None:
            object.__setattr__(self, name, operator.index(value))

    @property
    def by_epochs(self) -> bool:
        """True unless `steps` sets the length of the run, whose data are then an endless stream."""
        return self.steps is None

    def build_timetable(
        self, options: TrainConfig, loop_steps: int, epoch: Epoch | None, skips: bool = True
    ) -> Timetable:
        """Returns the timetable of the run.

        Args:
            options: the options of training.
            loop_steps: the maximum number of steps of a device loop.
            epoch: the length of one pass; None: the data are endless, or their length is unknown.
            skips: whether the steps of epochs before `initial_epoch` count as done; otherwise the
                data begin with that epoch.
        """
        if self.steps is not None:
            each = self.eval_every or self.steps
            intervals = -(-self.steps // each)
            table = Timetable(options, loop_steps, intervals, (each,), self.steps)
            return dataclasses.replace(table, by_epochs=False)
        epochs, steps_per_epoch = self.epochs or 1, self.steps_per_epoch
        limits = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
        epochs = min(filter(None, (epochs, limits[0])))
        if limits[1] is not None:
            steps_per_epoch = min(filter(None, (steps_per_epoch, limits[1])))
        if not skips:
            lengths = (steps_per_epoch,) if steps_per_epoch is not None else ()
            left = epochs - self.initial_epoch
            limit = 0 if left <= 0 else None
            first = self.initial_epoch
            table = Timetable(options, loop_steps, left, lengths, limit, numbered_from=first)
            return dataclasses.replace(table, validation_freq=self.validation_freq)
        if epoch is None:
            lengths = (steps_per_epoch,) if steps_per_epoch is not None else ()
            table = Timetable(options, loop_steps, epochs, lengths)
        else:
            lengths = divide_pass(steps_per_epoch, epoch.steps)
            alone = epoch.last is not None
            table = Timetable(options, loop_steps, epochs, lengths, None, 0, epoch.steps, alone)
            cut = steps_per_epoch is not None and steps_per_epoch * epochs > epoch.steps
            if cut and {*lengths} != {steps_per_epoch}:
                warnings.warn(
                    f"One pass over the data has {epoch.steps} batches, so some epochs end before "
                    f"steps_per_epoch={steps_per_epoch}. Add .repeat() to a tf.data.Dataset for "
                    "epochs of one length.",
                    stacklevel=2,
                )
        first = table.count_steps(self.initial_epoch) if lengths else 0
        return dataclasses.replace(table, first_step=first, validation_freq=self.validation_freq)


def check_profile(profile: str, steps: int | None) -> None:
    """Raises `UserError` if the steps to profile begin after the last step of a run."""
    for first, last in profile_plan(profile).windows:
        if steps is not None and first >= steps:
            raise UserError(
                f"profile={first}:{last} begins after the last of the run's {steps} steps."
            )
