"""The checkpoints of one call of `fit`, and the handling of a save that fails."""

import logging
import time
from collections.abc import Callable
from typing import Any

from tftpu.checkpoint.frozen_base import Base
from tftpu.checkpoint.store import Best, Checkpoints, Failure, Restored
from tftpu.engines.engine import Hosts
from tftpu.storage import files, side_files
from tftpu.training import restoring
from tftpu.training.timetable import Timetable

logger = logging.getLogger(__name__)


class Saver:
    """Saver of the checkpoints of one call of `fit`, which also restores the newest one.

    A host that writes neither checkpoints nor a part of them only restores.

    Args:
        checkpoints: the checkpoints of the workdir; None: there are none.
        base: the weights that the checkpoints leave out.
        hosts: the hosts that train together.
        timetable: the timetable, which says when a checkpoint is due.

    Attributes:
        workdir: the workdir of the run; None: it has none.
        saved_step: the last step that was saved without an error or restored; None: none.
        failure: the last save that failed; None: none did.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, base: Base, hosts: Hosts, timetable: Timetable
    ):
        writes = hosts.chief or hosts.exchange is not None
        self._readable = checkpoints
        self._checkpoints = checkpoints if writes else None
        self._base = base
        self._hosts = hosts
        self._timetable = timetable
        self._saved_at = time.monotonic()
        self.workdir = checkpoints.workdir if checkpoints is not None else None
        self._config = _read_config(self.workdir)
        self.saved_step: int | None = None
        self.failure: Failure | None = None

    @property
    def writes(self) -> bool:
        """True if this process writes checkpoints."""
        return self._checkpoints is not None

    def restore_newest(self) -> Restored | None:
        """Loads the newest checkpoint; returns None if there is none."""
        restored = restoring.restore(self._readable, self._base, self._hosts)
        if restored is not None:
            self.saved_step = restored.step
        return restored

    def reserve(self) -> None:
        """Starts to allocate host memory for a copy of the state; the first save needs it."""
        if self._checkpoints is not None:
            self._checkpoints.reserve(self._base.list_saved())

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step; False if this process writes none."""
        if self._checkpoints is None:
            return False
        return self._timetable.is_checkpoint_due(step, time.monotonic() - self._saved_at)

    def save(
        self, step: int, state: dict[str, Any], best: Best | None, first: Callable[[], None]
    ) -> None:
        """Starts to save a checkpoint of a step.

        Args:
            step: the number of steps done.
            state: the state of the run except its variables, as JSON.
            best: the metric and its value, if this checkpoint is the best so far.
            first: a function that the writing thread calls before the checkpoint becomes valid.
        """
        if self._checkpoints is None:
            return
        own = {"config": self._config}
        own |= {"base": self._base.digest} if self._base.digest else {}
        self._checkpoints.save(step, self._base.list_saved(), own | state, best, first)
        self.saved_step, self._saved_at = step, time.monotonic()
        if self.failure is not None and self.failure.step == step:
            self.failure = None  # that of an earlier save of this step, before a rollback

    def mark_best(self, best: Best) -> None:
        """Marks the last saved checkpoint as the best, after its evaluation."""
        if self._checkpoints is not None and self.saved_step is not None:
            self._checkpoints.mark_best(self.saved_step, best)

    def wait_for_saves(self) -> int | None:
        """Waits until nothing is being saved; returns the newest checkpoint's step, or None."""
        if self._checkpoints is None:
            return None
        saved = self._checkpoints.list_steps()
        self._checkpoints.retry_marking()
        self.warn_of_failure()
        return saved[-1] if saved else None

    def find_newest(self) -> int | None:
        """Returns the step of the newest checkpoint that this process knows of, or None."""
        return self._checkpoints.newest if self._checkpoints is not None else None

    def find_newest_up_to(self, step: int) -> int | None:
        """Returns the step of the newest checkpoint up to the given step; None if there is none."""
        steps = self._checkpoints.list_steps() if self._checkpoints is not None else []
        return max((saved for saved in steps if saved <= step), default=None)

    def warn_of_failure(self) -> None:
        """Warns once, on the chief, if the last save failed."""
        failure = self._checkpoints.take_failure() if self._checkpoints is not None else None
        if failure is not None:
            self.failure = failure
            self.saved_step = None if self.saved_step == failure.step else self.saved_step
            if not self._hosts.chief:
                return
            logger.warning(
                "The checkpoint of step %s could not be saved (%s). Training continues and saves "
                "again when the next checkpoint is due.",
                *(failure.step, failure.reason),
            )


def _read_config(workdir: str | None) -> dict[str, Any] | None:
    """Returns the config of the experiment in a workdir, as JSON; None if there is none."""
    return side_files.read(files.join(workdir, "config.json")) if workdir else None
