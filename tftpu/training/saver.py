"""Saving of checkpoints when they are due, and the handling of a save that fails."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.engines.engine import Hosts
from tftpu.engines.leaf import Leaf
from tftpu.training.timetable import Timetable

logger = logging.getLogger(__name__)


class Saver:
    """The writer of a run's checkpoints, or of this host's part of them.

    It does nothing on hosts that do not write.

    Args:
        checkpoints: of the workdir; None: this process writes none.
        leaves: returns the variables to save, by group.
        timetable: says when a checkpoint is due.
        state: returns the host's part of the state, as JSON.
        hosts: that train together.

    Attributes:
        saved_step: step of the last save that did not fail, or that was restored; None: none.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        leaves: Callable[[], Mapping[str, Sequence[Leaf]]],
        timetable: Timetable,
        state: Callable[[], dict[str, Any]],
        hosts: Hosts,
    ):
        self._says = hosts.chief
        self._checkpoints = checkpoints
        self._leaves = leaves
        self._timetable = timetable
        self._state = state
        self._saved_at = time.monotonic()
        self.saved_step: int | None = None

    @property
    def writes(self) -> bool:
        """True if this process writes checkpoints."""
        return self._checkpoints is not None

    def reserve(self) -> None:
        """Begins to allocate the copy in host memory, so that the first save does not wait."""
        if self._checkpoints is not None:
            self._checkpoints.reserve(self._leaves())

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step."""
        if self._checkpoints is None:
            return False
        return self._timetable.checkpoint_due(step, time.monotonic() - self._saved_at)

    def save(
        self, step: int, best: Best | None = None, first: Callable[[], None] = lambda: None
    ) -> None:
        """Starts to save a checkpoint of a step.

        Args:
            step: steps done.
            best: its metric, if it is the best so far.
            first: called by the thread that writes, before the checkpoint becomes valid.
        """
        if self._checkpoints is None:
            return
        if self.saved_step != step:
            self._checkpoints.save(step, self._leaves(), self._state(), best, first)
            self.saved_step, self._saved_at = step, time.monotonic()
        elif best is not None:  # a run that was asked to stop saved it before evaluating
            self._checkpoints.mark_best(step, best)

    def settle(self) -> int | None:
        """Waits until nothing is being saved; returns the step of the newest checkpoint."""
        if self._checkpoints is None:
            return None
        saved = self._checkpoints.steps()
        self.warn_of_failure()
        return saved[-1] if saved else None

    def newest(self) -> int | None:
        """Returns the step of the newest checkpoint that this process knows of."""
        return self._checkpoints.newest if self._checkpoints is not None else None

    def newest_up_to(self, step: int) -> int | None:
        """Returns the step of the newest checkpoint that is not after a step."""
        steps = self._checkpoints.steps() if self._checkpoints is not None else []
        return max((saved for saved in steps if saved <= step), default=None)

    def warn_of_failure(self) -> None:
        """Warns of the last save if it failed, once."""
        failure = self._checkpoints.take_failure() if self._checkpoints is not None else None
        if failure is not None:
            self.saved_step = None if self.saved_step == failure.step else self.saved_step
            if not self._says:
                return
            logger.warning(
                "The checkpoint of step %s could not be saved (%s). Training continues, and saves "
                "again when the next one is due.",
                *failure,
            )
