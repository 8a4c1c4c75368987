"""Waits for machines: one loop for all launchers, and messages if the wait ends early."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tftpu.errors import UserError
from tftpu.launch.cloud.google_cloud import (
    ConnectionLost,
    NotFoundError,
    QuotaError,
    RefusedError,
)

POLL_S = 10.0
# Seconds after which a lost connection ends the wait; the run itself continues.
PATIENCE_S = 600.0
LAST_LINES = 20  # number of lines shown of a failed machine's output
T = TypeVar("T")


def poll(look: Callable[[], T]) -> Iterator[T]:
    """Calls a function every `POLL_S` seconds and yields its results; retries lost connections.

    Requests beyond a quota are retried as well.

    Raises:
        ConnectionLost: no answer came for `PATIENCE_S` seconds.
        QuotaError: a quota was exceeded for as long.
    """
    lost_since = None
    while True:
        began = time.monotonic()
        try:
            found = look()
        except (ConnectionLost, QuotaError) as lost:
            if lost_since is None:
                lost_since = began
                print(f"{lost} Trying again for {PATIENCE_S / 60:.0f} minutes.", flush=True)
            if time.monotonic() - lost_since > PATIENCE_S:
                raise
        else:
            lost_since = None
            yield found
        time.sleep(POLL_S)


def retry(function: Callable[[], T]) -> T:
    """Repeats a request until an answer comes; after `PATIENCE_S`, raises `ConnectionLost`."""
    return next(poll(function))


class StateLog:
    """A printer of the states of a job, with the time, whenever they change."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def print(self, state: str, name: str = "") -> None:
        """Prints a state, unless it is the last one that was printed for the same name."""
        if self._shown.get(name) != state:
            self._shown[name] = state
            print(f"{time.strftime('%H:%M:%S')}  {f'{name} {state}'.lstrip()}", flush=True)


def print_last_lines(machine: str, log: str) -> None:
    """Prints the last lines of a machine's output."""
    lines = log.splitlines()[-LAST_LINES:]
    print(f"The last lines of {machine}:", *lines, sep="\n", flush=True)


@contextlib.contextmanager
def watching(running: str) -> Iterator[None]:
    """Prints a message if Ctrl-C ends the `with` block, and adds it to errors of requests in it.

    Args:
        running: the message, which names what still runs and the command that ends it.

    Raises:
        UserError: a request was rejected, or a lost connection was not restored. The message is not
            added to `NotFoundError`, because then nothing runs.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nNo longer watching. {running}", flush=True)
    except NotFoundError:
        raise
    except (ConnectionLost, RefusedError) as error:
        raise UserError(f"{error} {running}") from error


@contextlib.contextmanager
def creating(possible: str) -> Iterator[None]:
    """Raises `UserError` if a request in the `with` block is interrupted or gets no answer.

    Args:
        possible: a message that names what may exist now, and the command that ends it.
    """
    try:
        yield
    except (ConnectionLost, KeyboardInterrupt) as error:
        why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
        raise UserError(f"{why} {possible}") from error
