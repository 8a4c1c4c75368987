"""A writer with its own thread, so that training never waits for a disk or a bucket."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tftpu.config import TrainConfig
from tftpu.observe.services import BY_NAME
from tftpu.observe.writers import Hyperparameters, Writer

_log = logging.getLogger(__name__)

LIMIT = 10_000  # most calls that may wait; further ones are dropped
CLOSING = 20.0  # seconds that the end of a run waits for the thread
_UPLOADING = 300.0  # seconds to wait at a run's end for services that upload everything then


class Worker:
    """A thread that executes calls in order, from a queue of limited length.

    Args:
        name: the name of the thread.
        limit: number of calls that may wait.
        idle: a function that is called in the thread when no call is waiting.
    """

    def __init__(self, name: str, limit: int, idle: Callable[[], None] = lambda: None):
        self._name = name
        self._idle = idle
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        # An error of a call, which is raised later in the caller's thread.
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def submit(self, call: Callable[[], None]) -> bool:
        """Queues a call for the thread; returns False if too many are waiting.

        Raises:
            BaseException: the exception of an earlier call.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Waits until all calls have ended, or for `seconds`; returns whether they have ended."""
        done = threading.Event()
        if self._thread.ident is None:
            return True
        return self.submit(done.set) and done.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Ends the thread after all queued calls; returns False if that exceeds `seconds`.

        Raises:
            BaseException: the exception of a call.
        """
        if self._thread.ident is None:
            return True
        end = time.monotonic() + seconds
        try:
            self._calls.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
                if self._calls.empty():
                    self._idle()
            except BaseException as error:
                self._error = error


def open_services(options: TrainConfig, workdir: str) -> tuple[Writer, ...]:
    """Returns the writers of the services that `options.writers` names, each with its own thread.

    Raises:
        UserError: the package of a service is not installed, or the service cannot start.
    """
    metric = options.best_metric or "loss"
    made = [BY_NAME[name](workdir, metric) for name in options.writers]
    return tuple(Background(writer, _UPLOADING) for writer in made)


class Background(Writer):
    """A writer that passes its calls to another writer in a thread, in order.

    An error of the writer is reported once, as `Writers` does. While the writer waits for its disk
    or bucket, calls wait as well, up to `LIMIT`.

    Args:
        writer: the other writer, which only the thread may use from now on.
        closing: seconds that `close` waits.
    """

    def __init__(self, writer: Writer, closing: float = CLOSING):
        self._writer = writer
        self._closing = closing
        self._name = type(writer).__name__
        self._worker = Worker(self._name, LIMIT, lambda: self._make(writer.flush))
        self._failed = False
        self._dropped = 0

    def begin(self, config: Hyperparameters) -> None:
        self._do(self._writer.begin, config)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._do(self._writer.write, step, split, dict(scalars))

    def write_text(self, step: int, name: str, text: str) -> None:
        self._do(self._writer.write_text, step, name, text)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._do(self._writer.write_images, step, name, images)

    def say(self, text: str) -> None:
        self._do(self._writer.say, text)

    def roll_back(self, step: int) -> None:
        self._do(self._writer.roll_back, step)

    def flush(self, durable: bool = False) -> None:
        self._do(self._writer.flush, durable)

    def wait(self, seconds: float) -> bool:
        """Waits until all calls have ended; see `Worker.wait`."""
        return self._worker.wait(seconds)

    def close(self) -> None:
        """Waits for the thread, but not forever, because a bucket may not answer."""
        if self._dropped:
            _log.warning("%s lost the output of %s dropped calls.", self._name, self._dropped)
        self._do(self._writer.close)
        if not self._worker.close(self._closing):
            _log.warning(
                "%s could not write everything within %.0f s of the run's end: its output is "
                "incomplete.",
                self._name,
                self._closing,
            )

    def _do(self, call: Callable[..., None], *args: Any) -> None:
        if not self._worker.submit(lambda: self._make(call, *args)):
            if not self._dropped:
                _log.warning(
                    "%s has not answered for so long that %s calls wait for it: further calls "
                    "are dropped until it continues.",
                    self._name,
                    f"{LIMIT:,}",
                )
            self._dropped += 1

    def _make(self, call: Callable[..., None], *args: Any) -> None:
        """Executes a call in the thread; logs the first failure of the writer."""
        try:
            call(*args)
        except (OSError, *self._writer.failures) as error:
            if not self._failed:
                _log.warning("%s cannot write (%s): its output is incomplete.", self._name, error)
            self._failed = True
