"""Restarts a run that crashes, as long as it makes progress: `tftpu train --restarts=N`."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from tftpu.checkpoint.store import Checkpoints
from tftpu.errors import ExitCode

_NOT_RESTARTED = (ExitCode.DONE, ExitCode.USER_ERROR, ExitCode.PREEMPTED)
_LONGEST_WAIT = 60.0
_PR_SET_PDEATHSIG = 1  # the option PR_SET_PDEATHSIG of prctl(2)


def run(command: list[str], workdir: str, restarts: int, first_wait: float = 1.0) -> int:
    """Runs a command, and restarts it after a crash while it makes progress and restarts are left.

    Forwards signals to it. After a signal, a user's mistake or a preemption, it is not restarted.

    Args:
        command: the command that trains in the workdir and resumes there.
        workdir: the workdir, whose checkpoints show whether the run made progress.
        restarts: largest number of restarts.
        first_wait: seconds before the first restart; later waits double, up to a minute.

    Returns:
        The exit code of the last run, or 128 plus the number of the signal that killed it;
        `ExitCode.PREEMPTED` if a signal arrives before a restart.
    """
    child = _ChildProcess(command)
    reached, wait = None, first_wait
    for restart in range(1, restarts + 2):
        code = child.run()
        if code in _NOT_RESTARTED or child.stopped.is_set():
            return code
        try:
            saved = (Checkpoints(workdir).list_steps() or [0])[-1]
            where = f"its newest checkpoint is at step {saved}"
        except OSError as error:  # the bucket may be why the run ended
            saved, where = None, f"its checkpoints cannot be listed ({error})"
        happened = f"The run ended with {_describe_exit(code)}; {where}"
        if restart > restarts:
            _print_status(f"{happened}. All {restarts} restarts are used up.")
            return code
        if reached is not None and saved is not None and saved <= reached:
            _print_status(f"{happened}, as before the restart. No step was gained: giving up.")
            return code
        reached = reached if saved is None else saved
        _print_status(f"{happened}. Restart {restart} of {restarts} in {wait:.0f} s.")
        if child.stopped.wait(wait):
            return ExitCode.PREEMPTED
        wait = min(2 * wait, _LONGEST_WAIT)
    raise RuntimeError("unreachable: the last restart returns")


class _ChildProcess:
    """A command in its own process group, so that a terminal's Ctrl-C arrives once.

    On Linux it ends when this process ends or is killed, because it would otherwise keep the lock
    of its workdir.
    """

    def __init__(self, command: list[str]):
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._forward)

    def run(self) -> int:
        """Runs the command; returns its exit code, or 128 plus the signal that killed it."""
        self._process = subprocess.Popen(
            self._command, process_group=0, preexec_fn=_build_preexec_fn(os.getpid())
        )
        if self.stopped.is_set():  # the signal arrived before the process was started
            self._process.terminate()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, _: object) -> None:
        self.stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _build_preexec_fn(parent: int) -> Callable[[], None] | None:
    """Returns a function that makes the child end with this process; None except on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # loading it after a fork could deadlock

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(128 + signal.SIGTERM)

    return prepare


def _describe_exit(code: int) -> str:
    if code - 128 in signal.valid_signals():
        return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _print_status(text: str) -> None:
    print(f"tftpu: {text}", file=sys.stderr, flush=True)
