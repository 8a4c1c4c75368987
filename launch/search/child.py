"""Runs a trial in its own process, which reports every evaluation and may be asked to stop.

The processes are forked from a server that has imported TensorFlow but not started it. The import
is most of the time that a small run takes to start.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tftpu import fork_server

PRELOADED = ("tftpu.launch.run.training", "tftpu.launch.search.child")
PRUNE = "prune"
DIVERGED = "diverged"
HELD = "held"
_NOTED = 0.5  # seconds to wait for a signal that was already sent
_PATIENCE = 120.0  # seconds that the process of a killed worker may take to save and end


def start_server() -> None:
    """Starts the server that forks the processes. Must be called in the main thread."""
    fork_server.start(PRELOADED)


class TrialProcess:
    """A process that trains one trial.

    Args:
        argv: the arguments of `tftpu train`.
        run: the workdir in these arguments, local or `gs://`.
        metric: the evaluation metric that it reports.
        log: the local path of a file for its output.

    Attributes:
        connection: receives (number from 1, value, whether it is the last of the run) for every
            evaluation; the answer is PRUNE or "". A resumed run sends such a message before its
            first step, with the number of its last evaluation and the value None. It also receives
            DIVERGED if the run diverged, and HELD if another process has locked the run.
    """

    def __init__(self, argv: Sequence[str], run: str, metric: str, log: str):
        context = multiprocessing.get_context("forkserver")  # `start_server` has started it
        self.connection, theirs = context.Pipe()
        # The process is not a daemon, because daemons are killed before they save.
        arguments = (list(argv), run, metric, log, theirs)
        self._process = context.Process(target=_train, args=arguments)
        self._process.start()
        theirs.close()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, after which the run saves and can be resumed."""
        if self._process.is_alive():
            self._process.terminate()

    def close(self) -> None:
        """Asks the process to stop if it runs; waits for its end without answering messages."""
        self.ask_to_stop()
        self.connection.close()
        self._process.join()

    def wait(self) -> int:
        """Waits for the end; returns the exit code, or 128 plus the number of the signal."""
        self._process.join()
        code = self._process.exitcode or 0
        return code if code >= 0 else 128 - code


def _train(argv: list[str], run: str, metric: str, log: str, connection: Connection) -> None:
    os.setsid()  # Ctrl-C reaches only the search, which asks its trials to stop
    threading.Thread(target=_stop_with_the_worker, name="worker", daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from tftpu.launch import failures
    from tftpu.launch.run import start
    from tftpu.launch.settings.parsing import parse

    def run_trial() -> None:
        options = parse("train", start.Options, argv)
        experiment = options.load_experiment()
        with _report_end(connection), _locked_run(run):
            start.run_training(options, experiment, [_build_report_callback(metric, connection)])

    sys.exit(failures.run_for_exit_code(run_trial))


def _stop_with_the_worker() -> None:
    """Waits for the worker's end, then asks this process to save. Another worker resumes it."""
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _report_end(connection: Connection) -> Iterator[None]:
    """Reports to the worker that the run diverged or is locked, which exit codes do not say."""
    from tftpu.errors import DivergedError
    from tftpu.storage.owner import LockedError

    try:
        yield
    except (DivergedError, LockedError) as error:
        with contextlib.suppress(OSError):
            connection.send(HELD if isinstance(error, LockedError) else DIVERGED)
        raise


@contextlib.contextmanager
def _locked_run(run: str) -> Iterator[None]:
    """Locks a run; waits up to `_PATIENCE` seconds for a killed worker's process that saves it."""
    from tftpu.storage import locks
    from tftpu.storage.owner import LockedError

    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locks.locked(run))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield


def _build_report_callback(metric: str, connection: Connection) -> Any:
    """Returns a callback that reports the metric of every evaluation, and ends a pruned trial."""
    import keras

    class ReportCallback(keras.callbacks.Callback):
        """Reports evaluations to the search."""

        def __init__(self) -> None:
            super().__init__()
            self._begun = False

        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            if not self._begun and epoch:  # resumed: the answer to its last report may be lost
                self._ask(epoch, None, False, f"Pruned after evaluation {epoch}.")
            self._begun = True

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            value = (logs or {}).get(f"val_{metric}")
            if value is not None:
                last = epoch + 1 >= (self.params or {})["epochs"]
                text = f"Pruned after evaluation {epoch + 1}: {metric} {value:.4g}."
                self._ask(epoch + 1, float(value), last, text)

        def _ask(self, number: int, value: float | None, last: bool, pruned: str) -> None:
            if _ask_worker(connection, (number, value, last)) == PRUNE:
                print(pruned, flush=True)
                model: Any = self.model
                model.stop_training = True

    return ReportCallback()


def _ask_worker(connection: Connection, message: tuple[int, float | None, bool]) -> str:
    """Returns the worker's answer to a message; "" if either process is stopped first.

    Once asked to stop, this process does not wait for the worker, which may wait for a disk or
    bucket for longer than this process has to save.
    """
    asked: list[int] = []
    before: Any = signal.getsignal(signal.SIGTERM)

    def record_signal(number: int, frame: Any) -> None:
        asked.append(number)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, record_signal)
    try:
        connection.send(message)
        while not connection.poll(0.2) and not asked:
            pass
        if connection.poll():
            return connection.recv()
    except (EOFError, OSError):  # the worker was killed: see `_stop_with_the_worker`
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    _, _, last = message
    if not last:  # gives a signal that was sent time to end the run before its next step
        time.sleep(_NOTED)
    return ""
