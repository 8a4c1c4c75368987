"""The books of one `fit`: where it stands, what it has seen, and what falls due next."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.checkpoint.store import Best, Failure
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.leaves import leaves_of
from tftpu.errors import UserError, did_you_mean
from tftpu.observe import writers
from tftpu.runtime import goodput
from tftpu.storage import files
from tftpu.training.reporting import Report

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer

# Metrics for which less is better, by a part of their name.
_SMALLER_IS_BETTER = (
    *("loss", "error", "perplexity", "bits", "entropy", "mse", "mae", "mape", "msle"),
    *("divergence", "hinge", "poisson", "logcosh", "false_"),
)


class Run:
    """Where a run stands. Everything in it that must survive a restart is in `state`.

    Device loops stop at steps that depend on the settings alone, never on when a run was started
    or stopped: so a resumed run adds up the same numbers in the same order.
    """

    def __init__(
        self,
        trainer: "Trainer",
        steps: int,
        validation_data: tf.data.Dataset | None,
        eval_every: int | None,
        callbacks: Sequence[keras.callbacks.Callback],
    ):
        self._trainer = trainer
        self._steps = steps
        self._validation_data = validation_data
        self._epoch_steps = eval_every or steps
        self._batch_logs = any(map(_reads_batch_logs, callbacks))
        epochs = math.ceil(steps / self._epoch_steps)
        self._callbacks = internals.callback_list(
            list(callbacks), trainer.model, epochs, self._epoch_steps
        )
        self.history: keras.callbacks.History = internals.history_of(self._callbacks)
        self.step = 0
        self.skipped_batches = 0  # by rollbacks: the data are that far ahead of the step
        self._rollbacks = 0
        self._window = 0.0  # sums since the last line of the log
        self._epoch = 0.0  # sums since the last evaluation
        self._best: float | None = None
        self._last_finite: np.ndarray | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._past: tuple[dict, list] = {}, []  # the history of the run before this process
        self._config = _config_of(trainer.workdir)
        self._repeats_until = trainer.account.reached  # steps below were done once already
        self.state_at_end = goodput.FINISHED
        if validation_data is not None:
            self._refuse_best_metric()
        self._resume()
        self._report = Report(trainer, steps, self.step)

    def begin(self) -> None:
        """Tells the user and the callbacks that training starts."""
        self._report.begin()
        if self.step >= self._steps:
            workdir = self._trainer.workdir
            self._report.say(
                f"The run{f' in {workdir}' if workdir else ''} has its {self.step} steps already: "
                f"nothing is left to train. Another {'workdir' if workdir else 'Trainer'} trains "
                "anew, more steps train on."
            )
        elif self._saved_step is not None:
            self._report.say(f"Going on from the checkpoint of step {self.step}.")
        elif self.step:
            self._report.say(f"Going on from step {self.step}.")
        if self._trainer.writes and self.step < self._steps:
            self._trainer.checkpoints.reserve(leaves_of(self._trainer.step.variables))
        self._trainer.model.stop_training = False
        self._callbacks.on_train_begin()  # which empties the history's epochs
        self.history.history, self.history.epoch = self._past
        if self.step < self._steps:
            self._callbacks.on_epoch_begin(self._epoch_index())
            self._trainer.profiler.at(self.step)

    def over(self) -> bool:
        """Whether the run has all its steps, or a callback ended it."""
        return self.step >= self._steps or self._trainer.model.stop_training

    @property
    def position(self) -> int:
        """How many batches of the data lie behind the run."""
        return self.step + self.skipped_batches

    @property
    def part(self) -> str:
        """What the time of the next step is booked to: a repeated one brings nothing new."""
        return "restart" if self.step < self._repeats_until else "step"

    def next_stop(self) -> int:
        """The step that the next device loop ends at: the first at which something falls due."""
        trainer = self._trainer
        every = (
            trainer.steps_per_loop,
            trainer.log_every,
            trainer.checkpoint_every,
            self._epoch_steps,
        )
        stops = [(self.step // n + 1) * n for n in every if n]
        stops += [s for s in trainer.profiler.boundaries(self.step) if s > self.step]
        stop = min(self._steps, *stops)
        self._callbacks.on_train_batch_begin(self.step % self._epoch_steps)
        return stop

    def account(self, totals: np.ndarray) -> None:
        """Books the sums of one device loop."""
        trainer = self._trainer
        before, self.step = self.step, self.step + round(totals[0])
        repeated = min(self.step, self._repeats_until) - before
        trainer.account.repeated_steps += max(0, repeated)
        trainer.account.reached = max(self.step, trainer.account.reached)
        trainer.clock.turn_to(self.part)  # what the host does between two loops
        self._window = self._window + totals
        self._epoch = self._epoch + totals
        self._last_finite = totals
        with trainer.clock.spend("profiling"):
            trainer.profiler.at(self.step)
        self._report.advance(self.step, trainer.step.train_totals.loss(totals))
        # Metrics cost milliseconds to work out: not for callbacks that do not look at them.
        logs = self._trainer.step.train_totals.read(totals) if self._batch_logs else None
        self._callbacks.on_train_batch_end((self.step - 1) % self._epoch_steps, logs)

    def log(self) -> None:
        """Writes the means since the last line, if one is due."""
        due = self.step % self._trainer.log_every == 0 or self.over()
        if not due or np.ndim(self._window) == 0:
            return
        scalars = self._trainer.step.train_totals.read(self._window)
        scalars["learning_rate"] = self._learning_rate()
        scalars["weight_norm"] = self._trainer.weight_norm()
        rate = self._trainer.clock.window_rate()
        if rate:  # the first loop compiles: it measures nothing
            scalars["examples_per_sec"] = round(rate, 1)
        self._report.log(self.step, scalars)
        self._window = 0.0

    def evaluation_due(self) -> bool:
        """Whether an epoch is over, and its sums are not used yet."""
        over = self.step % self._epoch_steps == 0 or self.over()
        return over and np.ndim(self._epoch) > 0

    def evaluate(self) -> None:
        """Evaluates and ends the epoch, if it is over."""
        trainer = self._trainer
        if not self.evaluation_due():
            return
        logs = trainer.step.train_totals.read(self._epoch)
        if self._validation_data is not None:
            with self._report.doing("evaluating", "evaluation"):
                results = trainer.evaluate(self._validation_data)
                self._report.evaluated(self.step, results, self._validation_data)
            logs.update({f"val_{name}": value for name, value in results.items()})
        logs["learning_rate"] = self._learning_rate()
        self._epoch = 0.0
        self._callbacks.on_epoch_end(self._epoch_index() - 1, logs)
        if self._validation_data is not None:
            self._mark_best(results)
        if not self.over():
            self._callbacks.on_epoch_begin(self._epoch_index())

    def save(self, now: bool = False, best: Best | None = None) -> None:
        """Starts to save a checkpoint if one is due, or now; warns of the last one if it failed."""
        trainer = self._trainer
        if not trainer.writes:
            return
        self._warn(trainer.checkpoints.take_failure())
        every, minutes = trainer.checkpoint_every, trainer.checkpoint_minutes
        due = now or self.over() or (every and self.step % every == 0)
        due = due or (minutes and time.monotonic() - self._saved_at >= 60 * minutes)
        if not due:
            return
        if self._saved_step == self.step:
            if best is not None:  # evaluated only after a run that was asked to stop had saved it
                trainer.checkpoints.mark_best(self.step, best)
            return
        with self._report.doing("saving", "checkpoint_wait"):
            leaves = leaves_of(trainer.step.variables)
            trainer.checkpoints.save(self.step, leaves, self.state, best)
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self._report.saved()

    def settle(self) -> int | None:
        """Waits until nothing is being saved; the step of the newest checkpoint, or None."""
        if not self._trainer.writes:
            return None
        with self._report.doing("saving", "checkpoint_wait"):
            saved = self._trainer.checkpoints.steps()
        self._warn(self._trainer.checkpoints.take_failure())
        return saved[-1] if saved else None

    def newest(self) -> int | None:
        """The step of the newest checkpoint that this process knows of."""
        checkpoints = self._trainer.checkpoints
        return checkpoints.newest if checkpoints is not None else None

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            UserError: it could not be saved.
        """
        hosts, workdir = self._trainer.hosts, self._trainer.workdir
        saved = hosts.from_chief(self.settle())
        failed = self._trainer.writes and self._saved_step != self.step
        if hosts.any(failed)[0]:
            goes_on = f"goes on from step {saved}" if saved is not None else "starts anew"
            raise UserError(
                f"The run has its {self.step} steps, but its last checkpoint could not be saved "
                f"in {workdir!r}. Mend that: the same command then {goes_on}."
            )

    def _warn(self, failure: Failure | None) -> None:
        if failure is not None:
            self._saved_step = None if self._saved_step == failure.step else self._saved_step
            logging.warning(
                "The checkpoint of step %s could not be saved (%s). Training goes on, and saves "
                "again when the next one is due.",
                *failure,
            )

    def roll_back(self, totals: np.ndarray) -> None:
        """Goes back to the last checkpoint after a loss that was not finite, or ends the run.

        Raises:
            UserError: rollbacks are not asked for, or used up, or there is nothing to go back to.
        """
        trainer, first = self._trainer, self.step + 1
        last = self.step + round(totals[0])
        seen = ""
        if self._last_finite is not None:
            finite = trainer.step.train_totals.read(self._last_finite)
            seen = ", ".join(f"{k} {writers.format_number(v)}" for k, v in finite.items())
        where = f"The loss is not finite any more between step {first} and step {last}"
        where += f" (last finite: {seen})." if seen else "."
        kept = trainer.checkpoints.steps() if trainer.writes else []
        last_kept = trainer.hosts.from_chief(max((s for s in kept if s <= self.step), default=None))
        hint = (
            "Lower the learning rate, lengthen the warm-up, or clip the gradient (global_clipnorm)."
        )
        if trainer.on_nan != "rollback" or last_kept is None:
            good = f" The checkpoint of step {last_kept} is kept." if last_kept is not None else ""
            raise UserError(f"{where} {hint}{good}")
        self._rollbacks += 1
        if self._rollbacks > trainer.max_rollbacks:
            raise UserError(f"{where} {trainer.max_rollbacks} rollbacks did not help. {hint}")
        skipped, rollbacks = self.skipped_batches + last - last_kept, self._rollbacks
        self._repeats_until = max(self._repeats_until, self.step)
        self._resume()
        self.skipped_batches, self._rollbacks = skipped, rollbacks
        self.history.history, self.history.epoch = self._past
        if trainer.writes:
            files.truncate_lines(files.join(trainer.workdir, "metrics.jsonl"), self.step)
        logging.warning("%s Going back to step %s and skipping those batches.", where, self.step)

    def end(self) -> None:
        """Closes everything that is open; also after an error, and where one of these fails."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._trainer.clock.turn_to, None)
            last_first.callback(self._report.end, self.state_at_end)
            last_first.callback(self._callbacks.on_train_end)
            last_first.callback(self._trainer.profiler.stop)
            self.settle()

    @property
    def state(self) -> dict[str, Any]:
        """What the host knows, as JSON."""
        return {
            "config": self._config,
            "seed": self._trainer.seed,
            "position": self.position,
            "skipped_batches": self.skipped_batches,
            "rollbacks": self._rollbacks,
            "totals": self._trainer.step.train_totals.names,
            "window": np.asarray(self._window).tolist(),
            "epoch": np.asarray(self._epoch).tolist(),
            "best": self._best,
            "history": self.history.history,
            "epochs": self.history.epoch,
        }

    def _resume(self) -> None:
        restored = self._trainer.restore()
        if restored is None:
            self.step = int(self._trainer.step.step.numpy())  # of an earlier call
            return
        state = restored.state
        if state["seed"] != self._trainer.seed:
            logging.warning(
                "The run began with seed %s and goes on with %s: its numbers will not be those of "
                "either.",
                state["seed"],
                self._trainer.seed,
            )
        self.step = self._saved_step = restored.step
        self.skipped_batches = state["skipped_batches"]
        self._rollbacks = state["rollbacks"]
        if state["totals"] == self._trainer.step.train_totals.names:
            self._window = np.array(state["window"])
            self._epoch = np.array(state["epoch"])
        else:
            logging.warning(
                "The run was saved with other losses or metrics: the means of this epoch begin at "
                "step %s.",
                self.step,
            )
            self._window = self._epoch = 0.0
        self._best = state["best"]
        self._past = state["history"], state["epochs"]

    def _refuse_best_metric(self) -> None:
        """A name that no evaluation will have is found before the first epoch is trained."""
        totals, metric = self._trainer.step.eval_totals, self._trainer.best_metric
        evaluated = totals.read(totals.drain())
        if metric not in evaluated:
            raise UserError(
                f"The evaluation has no {metric!r} for best_metric."
                f"{did_you_mean(metric, evaluated)}"
            )

    def _mark_best(self, results: dict[str, float]) -> None:
        trainer = self._trainer
        metric = trainer.best_metric
        value = results[metric]
        sign = -1.0 if any(part in metric for part in _SMALLER_IS_BETTER) else 1.0
        better = self._best is None or sign * value > sign * self._best
        if better:
            self._best = value
            self.save(now=True, best=Best(metric, value))

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self._trainer.step.optimizer.learning_rate))

    def _epoch_index(self) -> int:
        return (
            math.ceil(self.step / self._epoch_steps)
            if self.over()
            else (self.step // self._epoch_steps)
        )


def _config_of(workdir: str | None) -> dict | None:
    """The experiment of a workdir, where it has one."""
    path = files.join(workdir or "", "config.json")
    return json.loads(files.read(path)) if workdir and files.exists(path) else None


def _reads_batch_logs(callback: keras.callbacks.Callback) -> bool:
    plain = keras.callbacks.Callback
    methods = ("on_train_batch_end", "on_batch_end")
    return any(getattr(type(callback), m) is not getattr(plain, m) for m in methods) or isinstance(
        callback, keras.callbacks.LambdaCallback
    )
