"""Being asked to stop: SIGTERM (a preempted VM) and Ctrl-C end a run after a last checkpoint."""

import signal
import threading
from types import FrameType


class PreemptionNotice:
    """A context in which a first signal is noted, for the loop to act on, and a second one kills.

    Signals reach the main thread of a process only; elsewhere the context does nothing.
    """

    def __init__(self):
        self.requested: str | None = None  # the name of the signal
        self._previous = {}

    def __enter__(self) -> "PreemptionNotice":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
