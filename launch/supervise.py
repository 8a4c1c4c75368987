"""`tftpu train --restarts=N`: a run that crashes is started again, as long as it gets on."""

import signal
import subprocess
import sys
import threading

from tftpu.checkpoint.store import Checkpoints
from tftpu.runtime.preemption import PREEMPTED

_NOT_RESTARTED = (0, 2, PREEMPTED)  # done; the user's mistake; asked to stop
_LONGEST_WAIT = 60.0


def run(command: list[str], workdir: str, restarts: int, first_wait: float = 1.0) -> int:
    """Runs a command until it ends well, gets nowhere, or the restarts are used up.

    Signals go on to the command; what ends after one is not started again.

    Args:
        command: trains in the workdir, and goes on there.
        workdir: whose checkpoints tell whether steps were gained.
        restarts: at most so many.
        first_wait: seconds before the first restart; each later wait is twice the one before.

    Returns:
        The exit code of the last run; 128 and the signal's number if one killed it.
    """
    child = _Child(command)
    reached, wait = None, first_wait
    for restart in range(1, restarts + 2):
        code = child.run()
        if code in _NOT_RESTARTED or child.stopped.is_set():
            return code
        saved = (Checkpoints(workdir).steps() or [0])[-1]
        happened = (
            f"The run ended with {_described(code)}; its newest checkpoint is of step {saved}"
        )
        if restart > restarts:
            _say(f"{happened}. All {restarts} restarts are used up.")
            return code
        if reached is not None and saved <= reached:
            _say(f"{happened}, as before the restart: no step was gained, so it is given up.")
            return code
        reached = saved
        _say(f"{happened}. Restart {restart} of {restarts} in {wait:.0f} s.")
        if child.stopped.wait(wait):
            return PREEMPTED
        wait = min(2 * wait, _LONGEST_WAIT)
    raise AssertionError("not reached")


class _Child:
    """The command as a process of a group of its own, so that a terminal's Ctrl-C comes once."""

    def __init__(self, command: list[str]):
        self._command = command
        self._process: subprocess.Popen | None = None
        self.stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._forward)

    def run(self) -> int:
        self._process = subprocess.Popen(self._command, process_group=0)
        if self.stopped.is_set():  # the signal came before there was a process to tell
            self._process.terminate()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, _) -> None:
        self.stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _described(code: int) -> str:
    if code - 128 in signal.valid_signals():
        return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _say(text: str) -> None:
    print(f"tftpu: {text}", file=sys.stderr, flush=True)
