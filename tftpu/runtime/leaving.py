"""Ends the process at once, from any thread; erases a line of progress from its terminal."""

import contextlib
import os
from typing import NoReturn

_ERASE_BELOW = b"\r\x1b[J"

_live_on: set[int] = set()  # descriptors of terminals that show a live line of progress


def note_live_line(descriptor: int) -> None:
    """Notes that a terminal shows a live line of progress, which `exit_at_once` is to erase."""
    _live_on.add(descriptor)


def forget_live_line(descriptor: int) -> None:
    """Notes that the live line of a terminal has ended."""
    _live_on.discard(descriptor)


def exit_at_once(code: int) -> NoReturn:
    """Erases the live line, if there is one, and ends the process; nothing is waited for.

    Args:
        code: the exit code.
    """
    for descriptor in tuple(_live_on):
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(descriptor, _ERASE_BELOW)
    os._exit(code)
