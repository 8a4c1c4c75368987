"""The state of a run, other than its variables, that must survive a restart."""

import copy
import dataclasses
import logging
from typing import Any

import numpy as np

from tftpu.checkpoint.store import Best
from tftpu.engines.own_steps import Logs

logger = logging.getLogger(__name__)


def parse_sums(saved: Any) -> Any:
    """Converts sums from JSON: a list to an array, a dict (of a model's `train_step`) to `Logs`."""
    return Logs(saved) if isinstance(saved, dict) else np.array(saved)


@dataclasses.dataclass
class RunProgress:
    """The position of a run, and the sums it has accumulated.

    Device loops stop at steps that depend only on the options, never on when a run was started
    or stopped. Therefore a resumed run adds up the same values in the same order.

    Attributes:
        step: steps done.
        skipped_batches: number of batches that rollbacks skipped, in addition to `step` batches.
        rollbacks: number of rollbacks.
        window: sums since the last line of metrics; None: there are none.
        epoch: sums since the epoch began; None: there are none.
        begun: whether the callbacks know that the present epoch began.
        best: the best value so far and its metric; None: nothing was evaluated.
        history: logs of the epochs by name, as `keras.callbacks.History` has them.
        epochs: indices of the epochs in `history`.
        ended: the run's planned steps, if a callback ended it early; None: no callback did.
        callbacks: the values that Keras's callbacks keep across epochs, by callback.
        pass_steps: the number of batches of one pass over a stream; None: unknown.
        lengths: the steps of the first epoch, and of one pass over the data; []: unknown.
        begun_at: the steps of earlier runs of the same `Trainer`, which `Executor.step` includes.
    """

    step: int = 0
    skipped_batches: int = 0
    rollbacks: int = 0
    window: Any = None
    epoch: Any = None
    begun: bool = False
    best: Best | None = None
    history: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    epochs: list[int] = dataclasses.field(default_factory=list)
    ended: int | None = None
    callbacks: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    pass_steps: int | None = None
    lengths: list[int] = dataclasses.field(default_factory=list)
    begun_at: int = 0

    @property
    def position(self) -> int:
        """The number of batches that the run has consumed."""
        return self.step + self.skipped_batches

    def continue_from(self, step: int) -> "RunProgress":
        """Returns the progress for another call of `fit`, whose callbacks start afresh.

        Args:
            step: the number of steps done; the sums of later steps, which an error interrupted, are
                dropped.
        """
        lengths = {"lengths": self.lengths, "pass_steps": self.pass_steps}
        new = RunProgress(step, begun_at=self.begun_at, **lengths)
        known = copy.deepcopy(self) if step == self.step else new
        known.history, known.epochs = copy.deepcopy(self.history), list(self.epochs)
        known.callbacks, known.skipped_batches = {}, self.skipped_batches
        return known

    def move_to(self, step: int, epochs: int) -> None:
        """Continues at a step whose weights a callback has restored, after some epochs.

        Args:
            step: the step, earlier or later.
            epochs: the number of epochs before the step; the history of later ones is dropped.
        """
        self.step, self.window, self.epoch, self.begun = step, None, None, False
        for listed in (self.epochs, *self.history.values()):
            del listed[epochs:]

    def extend(self, steps: int | None) -> None:
        """Lets a run that a callback ended continue if the length of the run has grown since.

        With the same length, the run stays ended.
        """
        if self.ended is not None and steps is not None and self.ended < steps:
            self.ended, self.callbacks = None, {}

    def add(self, sums: np.ndarray, steps: int) -> None:
        """Adds the sums of a device loop of this many steps."""
        self.step += steps
        self.window = sums if self.window is None else self.window + sums
        self.epoch = sums if self.epoch is None else self.epoch + sums

    def describe_start(self, over: bool, restored: bool, workdir: str | None) -> str:
        """Returns the message at the start of a run; "" for a new run.

        Args:
            over: whether nothing is left to train.
            restored: whether a checkpoint was restored.
            workdir: the workdir of the run.
        """
        if over:
            run, other = (f"run in {workdir}", "workdir") if workdir else ("run", "Trainer")
            done, length = f"already has {self.step:,} steps, and no more are requested", self.step
            if self.ended is not None:
                length = self.ended
                done = f"was ended by a callback at step {self.step} of {self.ended}"
            return (
                f"The {run} {done}: nothing is left to train. Another {other} trains from scratch; "
                f"more than {length} steps continue this run: --config.train.steps=N, "
                "--config.train.epochs=N or fit(steps=N)."
            )
        if restored:
            return f"Resuming from the checkpoint of step {self.step}."
        return f"Continuing from step {self.step}." if self.step else ""

    def to_json(self, names: list[str]) -> dict[str, Any]:
        """Returns the state as JSON.

        Args:
            names: the names of the losses and metrics that are summed up.
        """
        return {
            "position": self.position,
            "skipped_batches": self.skipped_batches,
            "rollbacks": self.rollbacks,
            "totals": names,
            "window": [] if self.window is None else self.window.tolist(),
            "epoch": [] if self.epoch is None else self.epoch.tolist(),
            "begun": self.begun,
            "best": self.best and self.best._asdict(),
            "history": self.history,
            "epochs": self.epochs,
            "ended": self.ended,
            "callbacks": self.callbacks,
            "pass_steps": self.pass_steps,
            "lengths": self.lengths,
        }

    @classmethod
    def from_json(cls, step: int, state: dict[str, Any], names: list[str]) -> "RunProgress":
        """Returns the progress that `to_json` wrote at a step.

        Args:
            step: the step of the checkpoint.
            state: the state as `to_json` returned it.
            names: the names of the losses and metrics that are summed up now. If they differ from
                those of the state, its sums are dropped with a warning.
        """
        window, epoch = (
            parse_sums(state[key]) if state[key] else None for key in ("window", "epoch")
        )
        begun = state.get("begun", epoch is not None)
        if state["totals"] != names:
            logger.warning(
                "The run was saved with other losses or metrics, so the means of this epoch "
                "begin at step %s.",
                step,
            )
            window = epoch = None
        return cls(
            step=step,
            skipped_batches=state["skipped_batches"],
            rollbacks=state["rollbacks"],
            window=window,
            epoch=epoch,
            begun=begun,
            best=Best(**state["best"]) if state["best"] else None,
            history=state["history"],
            epochs=state["epochs"],
            ended=state["ended"],
            callbacks=state.get("callbacks", {}),
            pass_steps=state.get("pass_steps"),
            lengths=state.get("lengths", []),
        )
