"""Being asked to stop: SIGTERM, Ctrl-C or a maintenance event of Google's cloud.

The loop is told, saves and ends. The main thread may sit in a device loop for seconds, where no
Python runs, so a thread of its own hears the signals, counts the grace period and asks the
metadata server.
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
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

PREEMPTED = 75  # the exit code EX_TEMPFAIL: try again
POLL_SECONDS = 5.0  # between two questions to the metadata server
_TIMEOUT = 2.0  # seconds for its answer


class PreemptionNotice:
    """A context in which being asked to stop is noted in `requested`, for the loop to act on.

    A second signal ends the process at once. So does the end of the grace period, but after a
    Ctrl-C, where nobody is about to end it from outside. Signals reach the main thread of a
    process only; elsewhere the context hears of maintenance alone.

    Args:
        grace_seconds: seconds from the notice to the end of the process.
        saved: gives the step of the newest checkpoint, or None, for the last words.
    """

    def __init__(self, grace_seconds: float = 25.0, saved: Callable[[], int | None] = lambda: None):
        self.requested: str | None = None  # the name of the signal, or "a maintenance event"
        self._grace = grace_seconds
        self._saved = saved
        self._previous = {}
        self._deadline: float | None = None
        self._warned = False

    def __enter__(self) -> "PreemptionNotice":
        self._ours, self._kernels = socket.socketpair()
        self._kernels.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # The C side of the signal handler writes the number, whatever Python is doing.
            self._previous_descriptor = signal.set_wakeup_fd(
                self._kernels.fileno(), warn_on_full_buffer=False
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._previous_descriptor)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._kernels.close()  # which the thread hears as the end
        self._thread.join()
        self._ours.close()

    def measured(self, steps: int, seconds: float) -> None:
        """Warns, once, of device loops that do not end within the grace period.

        Args:
            steps: of a device loop that compiled nothing.
            seconds: that it took.
        """
        # Half the time is for the save.
        if self._warned or steps < 2 or seconds < self._grace / 2:
            return
        self._warned = True
        logging.warning(
            "A device loop of %s steps takes %.0f s, and a preempted machine has %.0f s to end it "
            "and to save: set steps_per_loop to %s or less.",
            steps,
            seconds,
            self._grace,
            max(1, int(steps * self._grace / 2 / seconds)),
        )

    # In the listening thread

    def _listen(self) -> None:
        poll = POLL_SECONDS if on_google_cloud() else None
        while True:
            ends = [t for t in (poll, self._left()) if t is not None]
            ready, _, _ = select.select([self._ours], [], [], min(ends, default=None))
            if ready:
                numbers = self._ours.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._previous:
                        self._note(signal.Signals(number).name, number)
            elif self._left() == 0:
                self._run_out()
            elif self.requested is None and maintenance_event():
                self._note("a maintenance event")

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _note(self, reason: str, number: int = 0) -> None:
        if self.requested is not None:
            if number and not _interactive():
                _say(f"A second signal, {reason}: ended at once.")
                os._exit(128 + number)
            return
        self.requested = reason
        if number != signal.SIGINT and not _interactive():
            self._deadline = time.monotonic() + self._grace
        _say(f"{reason}: finishing the device loop, then saving. A second signal ends at once.")

    def _run_out(self) -> None:
        saved = self._saved()
        kept = "There is no checkpoint." if saved is None else f"The newest is of step {saved}."
        _say(
            f"The device loop and the last checkpoint did not end within the {self._grace:.0f} s "
            f"after {self.requested}. {kept} A lower steps_per_loop ends sooner."
        )
        os._exit(PREEMPTED)


@contextlib.contextmanager
def exit_on_notice() -> Iterator[None]:
    """A block around training, in which there is nothing to save: a SIGTERM ends it with 75.

    So a machine that is preempted while the run starts knows that it is to be run again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        _say("SIGTERM, and no step is under way: the same command goes on.")
        os._exit(PREEMPTED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def on_google_cloud() -> bool:
    """Whether there is a metadata server to ask; GCE_METADATA_HOST names another."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    with contextlib.suppress(OSError):
        return "Google" in Path("/sys/class/dmi/id/product_name").read_text()
    return False


def maintenance_event() -> str | None:
    """What the metadata server says is about to happen to this machine; None: nothing."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    quiet = {"maintenance-event": "NONE", "preempted": "FALSE"}
    # No answer, none of HTTP, or no text: the thread that asks must live, it hears the signals.
    no_answer = (OSError, http.client.HTTPException, UnicodeDecodeError)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for key, nothing in quiet.items():
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/instance/{key}",
            headers={"Metadata-Flavor": "Google"},
        )
        with contextlib.suppress(*no_answer), opener.open(request, timeout=_TIMEOUT) as answer:
            text = answer.read().decode().strip()
            if text and text != nothing:
                return text
    return None


def _interactive() -> bool:
    """In a notebook or a console, whose process is not the run's to end."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"tftpu: {text}", file=sys.stderr, flush=True)
