"""Notices to stop: SIGTERM, Ctrl-C, or a maintenance event of Google Cloud.

The training loop sees the notice, saves and stops. The main thread may spend seconds in a device
loop, where no Python runs, so a separate thread receives the signals and counts the grace period.
Another one polls the metadata server, because the network must not delay a signal.
"""

import contextlib
import http.client
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tftpu.errors import ExitCode
from tftpu.runtime import leaving

POLL_SECONDS = 5.0  # seconds between two requests to the metadata server
_TIMEOUT = 2.0  # seconds to wait for the server's next bytes
_TOTAL = 5.0  # seconds to wait for the server's whole answer
_LONGEST = 1000  # the most bytes of an answer that are read
_JOIN_SECONDS = 2.0  # seconds to wait for each thread at the end of the `with` block
# Seconds within which a repeated signal is the same notice; people take longer to repeat Ctrl-C.
_TOGETHER: dict[int, float] = {signal.SIGTERM: 2.0, signal.SIGINT: 0.3}
_MAINTENANCE = 0  # sent to the listening thread for a maintenance event; signals send their number

_log = logging.getLogger(__name__)


class PreemptionNotice:
    """A context manager that records a notice to stop in `requested`, for the loop to act on.

    A second signal ends the process at once, unless it repeats the first within a moment. So does
    the end of the grace period, except after Ctrl-C, which announces no shutdown of the machine. A
    notebook or console is never ended. Outside of the main thread, only maintenance events are
    noticed, because only the main thread receives signals.

    Args:
        grace_seconds: seconds from the notice to the end of the process.
        saved: function that returns the newest checkpoint's step, or None, for the last message.
        noted: function called at the first notice, in a separate thread.

    Attributes:
        requested: the name of the signal, or "a maintenance event"; None: no notice yet.
        loop_steps: number of steps of the current device loop, which the main thread sets; 0
            between two loops.
    """

    def __init__(
        self,
        grace_seconds: float = 25.0,
        saved: Callable[[], int | None] = lambda: None,
        noted: Callable[[], None] = lambda: None,
    ):
        self.requested: str | None = None
        self.loop_steps = 1
        self._grace = grace_seconds
        self._saved = saved
        self._noted = noted
        self._previous: dict[int, Any] = {}  # earlier signal handlers, by the number of the signal
        self._deadline: float | None = None
        self._warned = False
        self._since = 0.0  # the time of the first notice

    def __enter__(self) -> "PreemptionNotice":
        self._ours, self._kernels = socket.socketpair()
        self._kernels.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Python's C handler writes the signal's number to the socket, even in a device loop.
            self._previous_descriptor = signal.set_wakeup_fd(
                self._kernels.fileno(), warn_on_full_buffer=False
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, lambda *_: None)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._listen, name="preemption", daemon=True)]
        if on_google_cloud():
            poll = threading.Thread(target=self._poll, name="maintenance", daemon=True)
            self._threads.append(poll)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._previous_descriptor)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._ended.set()
        self._kernels.close()  # ends the thread that listens
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)  # the metadata thread may wait for the network
        self._ours.close()

    def check_loop_time(self, steps: int, seconds: float) -> None:
        """Warns once if device loops are too long to stop and save within the grace period.

        Warns only on machines of Google Cloud, where all TPUs are: others are not preempted.

        Args:
            steps: the steps of the last device loop, in which nothing was compiled.
            seconds: duration of that loop.
        """
        # Half of the grace period is for the device loop, the other half for saving.
        half = self._grace / 2
        if self._warned or steps < 2 or seconds < half or not on_google_cloud():
            return
        self._warned = True
        fitting = max(1, int(steps * half / seconds))
        _log.warning(
            "A device loop of %s steps takes %.1f s. A preempted machine has %g s, half of which "
            "(%g s) is reserved for saving, so a loop may take at most %g s: set "
            "train.steps_per_loop to %s or less, --config.train.steps_per_loop=%s.",
            *(steps, seconds, self._grace, half, half, fitting, fitting),
        )

    # Methods of the thread that polls the metadata server

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if fetch_maintenance_event():
                with contextlib.suppress(OSError):  # the end of `with` may have closed the socket
                    self._kernels.send(bytes([_MAINTENANCE]))
                return

    # Methods of the listening thread

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._ours], [], [], self._measure_left())
            if ready:
                numbers = self._ours.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._previous:
                        self._note_request(signal.Signals(number).name, number)
                    elif number == _MAINTENANCE and self.requested is None:
                        self._note_request("a maintenance event")
            elif self._measure_left() == 0:
                self._run_out()

    def _measure_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _note_request(self, reason: str, number: int = 0) -> None:
        if self.requested is not None:
            # A signal to a whole process group arrives a second time if the parent passes it on.
            together = _TOGETHER.get(number, 0.0) if reason == self.requested else 0.0
            if time.monotonic() < self._since + together:
                return
            if number and not _is_interactive():
                _print_status(f"A second signal, {reason}: exiting at once.")
                leaving.exit_at_once(128 + number)
            return
        self.requested, self._since = reason, time.monotonic()
        if number != signal.SIGINT and not _is_interactive():
            self._deadline = time.monotonic() + self._grace
        most = self.loop_steps
        loop = f"the current {most:,} steps" if most > 1 else "the current step"
        pending = loop if most else "what runs between the steps, such as an evaluation"
        _print_status(f"{reason}: finishing {pending}, then saving. A second signal exits at once.")
        self._noted()

    def _run_out(self) -> None:
        saved = self._saved()
        kept = "There is no checkpoint." if saved is None else f"Newest checkpoint: step {saved}."
        _print_status(
            f"The device loop and the last checkpoint did not finish within {self._grace:.0f} s "
            f"after {self.requested}. {kept} With a lower steps_per_loop, loops finish sooner."
        )
        leaving.exit_at_once(ExitCode.PREEMPTED)


@contextlib.contextmanager
def exit_on_notice() -> Iterator[None]:
    """Exits with code 75 on SIGTERM in a `with` block, for code that has nothing to save.

    The exit code tells a launcher that the machine was preempted, so it runs the command again.
    Outside of the main thread, this has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        _print_status("SIGTERM before or after training: run the same command again to resume.")
        leaving.exit_at_once(ExitCode.PREEMPTED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def on_google_cloud() -> bool:
    """Returns whether this is a machine of Google Cloud, or GCE_METADATA_HOST names a server."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    with contextlib.suppress(OSError, ValueError):
        return "Google" in Path("/sys/class/dmi/id/product_name").read_text()
    return False


def fetch_maintenance_event() -> str | None:
    """Returns the event that the metadata server announces for this machine, or None.

    A server that cannot be reached counts as announcing none.
    """
    quiet = {"maintenance-event": "NONE", "preempted": "FALSE"}
    for key, nothing in quiet.items():
        # Failures are ignored, because the next request may succeed. ValueError means that the
        # host's name is invalid.
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            text = _fetch_metadata(f"/computeMetadata/v1/instance/{key}")
            if text and text != nothing:
                return text
    return None


def _fetch_metadata(path: str) -> str | None:
    """Returns the metadata server's answer; None if it is late, an error, or another server's."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT)
    connection.connect()
    # Kept, because the connection forgets its socket once the answer begins.
    server = connection.sock
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    limit = threading.Timer(_TOTAL, end)
    limit.start()
    try:
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status != 200 or answer.headers["Metadata-Flavor"] != "Google":
            return None
        text = answer.read(_LONGEST).decode().strip()
        return None if late.is_set() else text
    finally:
        limit.cancel()
        connection.close()


def _is_interactive() -> bool:
    """Returns whether this process is a notebook or console, which must not be ended."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _print_status(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"tftpu: {text}", file=sys.stderr, flush=True)
