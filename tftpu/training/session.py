"""One call of `fit`: device loops, and the tasks between them."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np

from tftpu.amounts import format_metric
from tftpu.checkpoint.store import Best
from tftpu.config.keras_names import smaller_is_better
from tftpu.engines import keras_internals
from tftpu.engines.data.streams import Lookahead
from tftpu.engines.engine import Dataset, TrainLoop
from tftpu.errors import (
    DivergedError,
    HostLost,
    Preempted,
    UserError,
    counted,
    did_you_mean,
)
from tftpu.observe.profiler import Profiler
from tftpu.runtime import goodput
from tftpu.runtime.goodput import Account
from tftpu.runtime.preemption import PreemptionNotice
from tftpu.runtime.watchdog import Watchdog
from tftpu.storage import buckets
from tftpu.training.arguments import LOOP_STEPS
from tftpu.training.callbacks import Callbacks
from tftpu.training.epoch_loop import Feed
from tftpu.training.programs import Programs
from tftpu.training.progress import RunProgress
from tftpu.training.reporter import Reporter
from tftpu.training.saver import Saver
from tftpu.training.timetable import Timetable, check_profile

logger = logging.getLogger(__name__)

_LESS = (
    "Lower the learning rate, lengthen the warmup, or clip the gradient "
    "(--config.train.global_clipnorm=1.0, or TrainConfig(global_clipnorm=1.0))."
)


class Session:
    """One call of `fit`, from the newest checkpoint to the last step.

    Args:
        programs: the programs of the model.
        loop: the loop that trains on the devices.
        timetable: the steps at which logs, evaluations and checkpoints are due.
        feed: the batches to train on.
        validation_data: the data to evaluate at the end of each epoch; None: no evaluation.
        callbacks: the Keras callbacks.
        saver: the saver of checkpoints.
        account: the account of the run's time.
        profiler: the profiler that takes traces.
        watchdog: the watchdog that ends a run that hangs.
        before: the progress after the previous call of `fit`.
        build_reporter: a function that returns the reporter of a run that begins at a given step.

    Attributes:
        progress: the progress of the run.

    Raises:
        UserError: `best_metric`, `profile`, a callback or the checkpoint does not fit the run.
    """

    def __init__(
        self,
        programs: Programs,
        loop: TrainLoop,
        timetable: Timetable,
        feed: Feed,
        validation_data: Dataset,
        callbacks: Callbacks,
        saver: Saver,
        account: Account,
        profiler: Profiler,
        watchdog: Watchdog,
        before: RunProgress,
        build_reporter: Callable[[int], Reporter],
    ):
        self._programs = programs
        self._executor = programs.executor
        self._engine = programs.engine
        self._hosts = programs.engine.hosts
        self._options = programs.options
        self._loop = loop
        self._timetable = timetable
        self._feed = feed
        self._validation_data = validation_data
        self._callbacks = callbacks
        self._saver = saver
        self._account = account
        self._clock = account.clock
        self._profiler = profiler
        self._watchdog = watchdog
        self._last_finite: np.ndarray | None = None
        # The steps of the last saves of a best checkpoint, each with the best one before.
        self._marked: list[tuple[int, Best | None]] = []
        self._save_due = False  # whether a save was due after the last device loop
        # The step up to which the run was trained before; steps before it are repeated.
        self._repeats_until = account.reached
        self._check_best_metric()
        callbacks.check_monitored(self._executor, validation_data is not None)
        check_profile(self._options.profile, timetable.steps)
        restored = self._restore_newest()
        self._resumes = restored is not None
        self.progress = restored or before.continue_from(self._executor.step - before.begun_at)
        if self.progress.pass_steps is not None and timetable.pass_steps is None:
            self._timetable = timetable.end_data(self.progress.pass_steps, feed.begins_again)
        self._check_epochs()
        if self.progress.step < timetable.first_step:
            self._executor.begin_at(self.progress.begun_at + timetable.first_step)
            self.progress.step = timetable.first_step
        self.progress.extend(self._timetable.steps)
        self._reporter = build_reporter(self.progress.step)

    @property
    def _step(self) -> int:
        return self.progress.step

    @property
    def over(self) -> bool:
        """True if all steps of the run are done, or a callback has ended it."""
        ended = self.progress.ended is not None or self._callbacks.stopped
        return ended or self._timetable.is_over(self._step)

    def run(self) -> keras.callbacks.History:
        """Trains until the run is over.

        Raises:
            UserError: the loss is no longer finite, passes over the data differ in length, or the
                last checkpoint could not be saved.
            Preempted: the run was asked to stop, after a checkpoint was saved.
            HostLost: another host of the run failed.
        """
        ended = goodput.FAILED
        try:
            self._begin()
            batches = self._open_feed(new=self._resumes) if not self.over else None
            with (
                self._hosts.together(),
                PreemptionNotice(
                    self._options.grace_seconds,
                    self._saver.find_newest,
                    self._reporter.write_account,
                ) as notice,
                self._watchdog,
                self._profiler.listening(),
            ):
                notice.loop_steps = 0
                self._evaluate_restored(notice)
                while not self.over:
                    if isinstance(batches, Lookahead) and batches.ended:
                        batches = self._open_feed()
                    sums, steps = self._advance(batches, notice)
                    if self._loop.diverged(sums) and not self._callbacks.ends_on_nan:
                        self._roll_back(steps)
                        batches = self._open_feed()
                        self._evaluate_restored(notice)
                        continue
                    if isinstance(batches, Lookahead):
                        self._follow_pass(batches.ended, self.progress.position + steps)
                    self._count(sums, steps)
                    asked = self._is_any_asking(notice)
                    self._log()
                    if not asked:  # an evaluation may take longer than the grace period
                        self._evaluate()
                        asked = self._is_any_asking(notice)
                        self._log()  # logs the last steps if a callback has just ended the run
                    self._save(now=asked)
                    if asked and (self._evaluation_due or not self.over):
                        self._leave(notice)
                self._finish_training()  # a callback may have stopped the run between epochs
                self._finish_saving()
            ended = goodput.FINISHED
        except BaseException as error:
            ended = _choose_final_state(error)
            if self._engine.lost_host(error):
                raise self._explain_lost_host(error) from error
            raise
        finally:
            self._end(ended)
        return self._callbacks.history

    def _evaluate_restored(self, notice: PreemptionNotice) -> None:
        """Makes the evaluation that a run which was asked to stop may have skipped."""
        self._evaluate()
        if self._is_any_asking(notice) and not self.over:
            self._leave(notice)  # no step was trained, so there is nothing to save

    def _advance(self, batches: Any, notice: PreemptionNotice) -> tuple[np.ndarray, int]:
        """Runs steps up to the next stop; returns the sums of their metrics and their number."""
        profiler, first = self._profiler, not self._loop.compiled(batches)
        stop = self._timetable.find_next_stop(self._step, profiler.list_boundaries(self._step))
        self._feed.begin_epoch(self._timetable.count_left_of_epoch(self._step))
        if self.progress.epoch is None:
            self._executor.begin_epoch()
        epoch = self._timetable.locate(self._step)
        self._callbacks.begin_batch(self._step - epoch.first)
        count, start = stop - self._step, time.monotonic()
        notice.loop_steps = count
        begins = first and self._last_finite is None
        shown = self._reporter.show_compiling() if begins else contextlib.nullcontext()
        part = "compiling" if first else "profiling" if profiler.running else self._part
        with shown, self._clock.spend(part), profiler.marker(self._step):
            result = self._loop.run(batches, count)
        notice.loop_steps = 0
        seconds, count = time.monotonic() - start, result.steps
        profiler.note_wait(result.input_wait)
        if part in ("compiling", "step"):
            self._clock.move(result.input_wait, part, "input_wait")
        if part in ("step", "restart"):
            self._clock.count(count * self._reporter.global_batch_size, seconds)
            profiler.observe(seconds / count)
        self._watchdog.beat(self._step + count)
        if not first:
            notice.check_loop_time(count, seconds)
        return result.sums, count

    @property
    def _part(self) -> str:
        """The account's part for the next step's time: "step", or "restart" for a repeated step."""
        return "restart" if self._step < self._repeats_until else "step"

    def _count(self, sums: np.ndarray, steps: int) -> None:
        """Adds a device loop's sums to the progress; updates the reporter and the callbacks."""
        before = self._step
        self.progress.add(sums, steps)
        self._account.count_steps(before, self._step, self._repeats_until)
        self._clock.turn_to(self._part)  # the time of the host's work between two loops
        self._last_finite = sums
        with self._clock.spend("profiling"):
            self._profiler.start_or_stop(self._step)
        self._reporter.advance(self._step, self._executor.train_sums.compute_loss(sums))
        epoch = self._timetable.locate(self._step - 1)
        self._callbacks.end_batch(
            self._step - 1 - epoch.first,
            self._timetable.is_evaluation_due(self._step) or self.over,
            lambda: self._executor.train_sums.read(self.progress.epoch),
        )

    def _is_any_asking(self, notice: PreemptionNotice) -> bool:
        """Returns whether any host was asked to stop; copies `stop_training` of one host to all.

        The hosts also agree whether a checkpoint is due, because their clocks may differ.
        """
        flags = (
            notice.requested is not None,
            self._callbacks.stopped,
            self._saver.is_due(self._step),
        )
        asked, self._callbacks.stopped, self._save_due = self._hosts.any(*flags)
        return asked

    def _open_feed(self, new: bool = False) -> Any:
        """Returns the batches from the run's position on.

        Args:
            new: whether the run was restored and has not read any batch since.
        """
        return self._feed.open(self.progress.position, self._timetable.pass_steps, new)

    def _follow_pass(self, ended: bool, step: int) -> None:
        """Records the length of a stream's first pass, and checks the length of later passes.

        Args:
            ended: whether a pass ended with the last batch.
            step: the number of batches so far.

        Raises:
            UserError: a later pass has another length, so a resumed run would lose its position.
        """
        known = self._timetable.pass_steps
        if known is not None and self._feed.begins_again and ended != (step % known == 0):
            raise UserError(
                f"A pass over the data has {'fewer' if ended else 'more'} batches than the first, "
                f"which had {known}. A resumed run counts batches, so passes must be of one "
                "length: pass a generator that never ends, with steps_per_epoch=."
            )
        if known is not None or not ended:
            return
        before, self.progress.pass_steps = self._timetable, step
        self._timetable = before.end_data(step, self._feed.begins_again)
        self.progress.lengths = self._timetable.describe_epochs() or self.progress.lengths
        if not self._feed.begins_again and (before.epochs > 1 or before.limit is not None):
            logger.warning(
                "The data ended after %s batches and cannot begin again, so the run ends there. "
                "A keras.utils.PyDataset or a tf.data.Dataset can begin again.",
                step,
            )

    def _leave(self, notice: PreemptionNotice) -> NoReturn:
        """Raises `Preempted` once nothing is being saved."""
        saved = self._hosts.from_chief(self._wait_for_saves())
        raise Preempted(notice.requested or "another host", self._step, saved)

    # Tasks between device loops

    def _log(self) -> None:
        """Writes a line of metrics, their means since the last line, if one is due."""
        window = self.progress.window
        if window is None or not (self._timetable.is_log_due(self._step) or self.over):
            return
        sums = self._executor.train_sums
        scalars = sums.read(window) | sums.read_gradients(window)
        scalars["learning_rate"] = self._executor.learning_rate
        scalars["weight_norm"] = self._executor.weight_norm
        rate = self._clock.compute_window_rate()
        if rate:  # 0 until a loop was measured; the first one compiles
            scalars["examples_per_sec"] = round(rate, 1)
        self._reporter.log(self._step, scalars)
        self.progress.window = None

    @property
    def _evaluation_due(self) -> bool:
        """True if an epoch is over and its end has not been processed yet."""
        over = self._timetable.is_evaluation_due(self._step) or self.over
        return over and self.progress.epoch is not None

    def _evaluate(self) -> None:
        """Evaluates and ends the epoch, if it is over; saves a checkpoint if it is the best."""
        sums = self.progress.epoch
        if sums is None or not self._evaluation_due:
            return
        if self._timetable.is_evaluation_due(self._step) or self._timetable.is_over(self._step):
            self._feed.end_epoch()
        number = self._timetable.locate(self._step - 1).number
        logs = self._executor.train_sums.read(self._executor.finish_epoch(sums))
        results: dict[str, float] = {}
        if self._validation_data is not None and self._timetable.is_validated(number):
            with self._reporter.doing("evaluating", "evaluation"):
                self._reporter.write_account()  # shows that the run is evaluating
                results = self._callbacks.run_evaluation(
                    lambda build_hooks: self._programs.evaluate(
                        self._validation_data, self._clock, self._watchdog, build_hooks
                    )
                )
                self._reporter.log_evaluation(self._step, results, self._validation_data)
            logs.update({f"val_{name}": value for name, value in results.items()})
        self.progress.epoch = None
        self._callbacks.end_epoch(number, logs)
        self.progress.begun = False
        self.progress.callbacks = self._callbacks.get_state()
        if self.over:
            self._finish_training()
        if results:
            self._mark_best(results)
        if not self.over:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Tells the callbacks that an epoch begins, or that the run resumes within it."""
        number = self._timetable.locate(self._step - self._evaluation_due).number
        self._callbacks.begin_epoch(number, self.progress.begun)
        self.progress.begun = True

    def _finish_training(self) -> None:
        """Finishes training in the executor and the callbacks; may be called more than once."""
        self._executor.finish_training()
        self._callbacks.finish()

    def _mark_best(self, results: dict[str, float]) -> None:
        metric = self._options.best_metric or "loss"
        if metric not in results:  # a model's own `test_step` may log anything
            if not self._options.best_metric:
                return
            raise UserError(
                f"train.best_metric is {metric!r}, which the evaluation does not have: it has "
                f"{', '.join(results)}.{did_you_mean(metric, results)}"
            )
        self._note_failure()
        value, before = results[metric], self.progress.best
        if not math.isfinite(value):
            logger.warning("The evaluation's %s is %s at step %s.", metric, value, self._step)
            return
        sign = -1.0 if smaller_is_better(metric) else 1.0
        # Values of another metric, from before the run was resumed, cannot be compared.
        if before is None or before.metric != metric or sign * value > sign * before.value:
            self.progress.best = Best(metric, value)
            # A save's failure is known at the next one, so two of them may have failed.
            self._marked = [*self._marked[-1:], (self._step, before)]
            self._save(now=True, best=self.progress.best)

    def _note_failure(self) -> None:
        """Warns if the last save failed; a best checkpoint that is lost is no longer the best."""
        self._saver.warn_of_failure()
        failure = self._saver.failure
        for place, (step, before) in enumerate(self._marked):
            if failure is not None and step == failure.step:
                del self._marked[place]
                if place < len(self._marked):
                    self._marked[place] = self._marked[place][0], before
                else:
                    self.progress.best = before
                return

    def _save(self, now: bool = False, best: Best | None = None) -> None:
        """Starts to save a checkpoint if one is due, or in any case with `now`."""
        if not self._saver.writes:
            return
        self._note_failure()
        if not (now or self.over or self._save_due):
            return
        if self.over and not self._evaluation_due:
            self._finish_training()
        # Already saved, because a run that is asked to stop saves before it evaluates.
        if self._saver.saved_step == self._step:
            if best is not None:
                self._saver.mark_best(best)
            return
        with self._reporter.doing("saving", "checkpoint_wait"):
            self._saver.save(self._step, self._build_state(), best, self._reporter.flush)
        self._reporter.write_account()  # complete even if the run is killed now

    def _wait_for_saves(self) -> int | None:
        """Waits until nothing is being saved; returns the newest checkpoint's step, or None."""
        if not self._saver.writes:
            return None
        with self._reporter.doing("saving", "checkpoint_wait"):
            return self._saver.wait_for_saves()

    def _roll_back(self, steps: int) -> None:
        """Returns to the last checkpoint after a loss that was not finite, or ends the run.

        Args:
            steps: the number of steps in the device loop.

        Raises:
            DivergedError: rollbacks are disabled or used up, or there is no checkpoint.
        """
        options = self._options
        last = self._step + steps
        between = (
            f"between step {self._step + 1} and step {last}" if steps > 1 else f"at step {last}"
        )
        where = f"The loss is no longer finite {between}"
        if self._last_finite is not None:
            finite = self._executor.train_sums.read(self._last_finite)
            seen = ", ".join(f"{k} {format_metric(v)}" for k, v in finite.items())
            where += f" (last finite: {seen})"
        kept = self._hosts.from_chief(self._saver.find_newest_up_to(self._step))
        if options.on_nan != "rollback" or kept is None:
            good = f" The checkpoint of step {kept} is kept." if kept is not None else ""
            raise DivergedError(f"{where}. {self._find_cause(steps)}{good}")
        rollbacks = self.progress.rollbacks + 1
        if rollbacks > options.max_rollbacks:
            tried = f"{options.max_rollbacks} rollbacks did not help"
            raise DivergedError(f"{where}. {tried}. {self._find_cause(steps)}")
        skipped = self.progress.skipped_batches + last - kept
        self._repeats_until = max(self._repeats_until, self._step)
        self.progress = self._restore_newest() or self.progress
        self.progress.skipped_batches, self.progress.rollbacks = skipped, rollbacks
        self.progress.pass_steps = self._timetable.pass_steps
        self.progress.lengths = self._timetable.describe_epochs() or self.progress.lengths
        self._callbacks.restore(self.progress)
        self._begin_epoch()
        self._reporter.roll_back(self._step)
        logger.warning("%s. Returning to step %s and skipping those batches.", where, self._step)

    def _find_cause(self, steps: int) -> str:
        """Returns a possible cause of a non-finite loss in the last `steps` steps, or advice."""
        found = self._feed.describe_damage(self._programs.model, self.progress.position, steps)
        return found or _LESS

    # Start and end of a run

    def _begin(self) -> None:
        """Tells the user and the callbacks that training begins."""
        self._reporter.begin()
        restored = self._saver.saved_step is not None
        message = self.progress.describe_start(self.over, restored, self._saver.workdir)
        if message:
            self._reporter.write_message(message, always=self.over)
        if not self.over:
            self._saver.reserve()
            if keras_internals.has_frozen_weights(self._programs.model):
                self._reporter.write_message(_describe_trained(self._programs.model))
            if self._programs.undivided_because:
                self._reporter.write_message(
                    f"{self._programs.undivided_because} So the model's own steps run, each on a "
                    "whole batch."
                )
            thrown = self._feed.count_thrown_away(self.progress.position) if self._resumes else 0
            if thrown:
                self._reporter.write_message(
                    f"The data start at their first batch: {thrown:,} batches are read and thrown "
                    "away."
                )
        unset = self._options.steps_per_loop is None and self._timetable.loop_steps == 1
        if not self.over and unset and self._callbacks.watches_batches:
            self._reporter.write_message(
                f"A callback has batch methods, so a device loop has 1 step instead of "
                f"{LOOP_STEPS}. TrainConfig(steps_per_loop=N) calls the methods every N batches."
            )
        keras_internals.forget_initial_epoch(self._programs.model)
        self._callbacks.begin(self.progress)
        begins = not self._resumes and not self.progress.begun_at
        # A callback may have loaded them.
        self._programs.follow_weights(self._timetable.first_step if begins else 0)
        self._begin_at_epoch(keras_internals.find_initial_epoch(self._programs.model))
        if not self.over:
            self._begin_epoch()
            self._profiler.start_or_stop(self._step)

    def _begin_at_epoch(self, epoch: int) -> None:
        """Moves the run to the epoch from which a `BackupAndRestore` callback restored the model.

        Args:
            epoch: the index of the next epoch; 0: no callback restored the model.

        Raises:
            UserError: the callback undid what the workdir's checkpoint had restored.
        """
        epoch -= self._timetable.numbered_from
        if epoch <= 0 or not self._timetable.lengths:
            return
        first = self._timetable.count_steps(epoch)
        if first < self._step and self._resumes:
            raise UserError(
                f"A BackupAndRestore callback restored the weights of step {first}, but the "
                f"workdir had restored those of step {self._step}. Leave out the callback: a "
                "workdir resumes without it."
            )
        if first != self._step:
            self._executor.begin_at(self.progress.begun_at + first)
            self.progress.move_to(first, epoch)

    def _finish_saving(self) -> None:
        """Waits for the last checkpoint. Raises `UserError` if it could not be saved."""
        saved = self._hosts.from_chief(self._wait_for_saves())
        failed = self._saver.writes and self._saver.saved_step != self._step
        error = self._saver.failure.error if self._saver.failure is not None else None
        # All hosts exit with the same code.
        failed, away = self._hosts.any(failed, isinstance(error, buckets.UnavailableError))
        if failed:
            error = buckets.UnavailableError(str(error)) if away else error
            then = f"resumes from step {saved}" if saved is not None else "starts from scratch"
            raise UserError(
                f"All {self._step} steps are trained, but the last checkpoint could not be saved "
                f"in {self._saver.workdir!r}. Fix that: the same command then {then}."
            ) from error

    def _end(self, state: str) -> None:
        """Closes everything that is open, even after an error, or if closing one of them fails."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._clock.turn_to, None)
            last_first.callback(self._reporter.end, state)
            last_first.callback(self._callbacks.end, state == goodput.FAILED)
            last_first.callback(self._profiler.stop)
            last_first.callback(self._feed.close)
            self._wait_for_saves()

    def _explain_lost_host(self, error: BaseException) -> HostLost:
        last_line = str(error).strip().rpartition("\n")[2][:200]
        return HostLost(
            f"Another host of the run was lost after step {self._step}, or failed: see its output. "
            "Started again on all hosts, the same command resumes from the last checkpoint. "
            f"({last_line})"
        )

    # State of a run

    def _build_state(self) -> dict[str, Any]:
        """Returns the state of the run except its variables, as JSON."""
        progress = self.progress.to_json(list(self._executor.train_sums.names))
        length = self._step if self._timetable.steps is None else self._timetable.steps
        ended = {"ended": length} if self._callbacks.stopped else {}
        return {"seed": self._options.seed} | progress | ended

    def _restore_newest(self) -> RunProgress | None:
        """Loads the newest checkpoint; returns its progress, or None if there is none."""
        restored = self._saver.restore_newest()
        if restored is None:
            return None
        if restored.state["seed"] != self._options.seed:
            logger.warning(
                "The run began with seed %s and resumes with %s, so its results match those of "
                "neither seed.",
                restored.state["seed"],
                self._options.seed,
            )
        names = list(self._executor.train_sums.names)
        return RunProgress.from_json(restored.step, restored.state, names)

    def _check_epochs(self) -> None:
        """Records how many steps the epochs of the run have.

        Raises:
            UserError: the run has begun with epochs of other lengths, so they cannot be counted.
        """
        before, now = self.progress.lengths, self._timetable.describe_epochs()
        if self._step and before and self._timetable.by_epochs and before != now:
            where = f" in {self._saver.workdir!r}" if self._saver.workdir else ""
            raise UserError(
                f"The run{where} is at step {self._step:,} and began with "
                f"{_describe_lengths(before)}; this call has {_describe_lengths(now)}. Its epochs "
                "are counted from its beginning, so it continues only with the same batch size, "
                "number of examples and steps_per_epoch. fit(steps=N), the total number of steps, "
                f"continues it with others; another {'workdir' if where else 'Trainer'} begins "
                "another run."
            )
        self.progress.lengths = now or (before if self._step else [])

    def _check_best_metric(self) -> None:
        """Raises `UserError` if the evaluation does not compute the metric `best_metric`."""
        metric, known = self._options.best_metric, self._executor.eval_sums.result_names
        if metric and self._validation_data is None:
            raise UserError(
                f"best_metric is {metric!r}, but nothing is evaluated: pass validation_data."
            )
        if metric and known is not None and metric not in known:
            raise UserError(
                f"best_metric is {metric!r}, but the evaluation has no such "
                f"metric.{did_you_mean(metric, known)}"
            )


def _describe_lengths(lengths: list[int]) -> str:
    """Returns the lengths of epochs, as `Timetable.describe_epochs` returns them, in words."""
    if not lengths:
        return "epochs of unknown length"
    epoch, whole = lengths
    passes = f", {whole:,} in a pass over the data" if whole != epoch else ""
    return f"epochs of {counted(epoch, 'step')}{passes}"


def _describe_trained(model: keras.Model) -> str:
    """Returns a message with the number of trained weights and the number of all weights."""
    trained, total = (
        sum(math.prod(v.shape) for v in weights)
        for weights in (model.trainable_weights, model.weights)
    )
    return f"{trained:,} of {total:,} weights are trained."


def _choose_final_state(error: BaseException) -> str:
    """Maps an exception to the run's final state."""
    if isinstance(error, Preempted):
        return goodput.STOPPED if error.reason == "SIGINT" else goodput.PREEMPTED
    return goodput.STOPPED if isinstance(error, KeyboardInterrupt) else goodput.FAILED
