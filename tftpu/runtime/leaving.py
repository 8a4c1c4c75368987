"""Ends the process at once, from any thread, and leaves its terminal fit for a prompt."""

import contextlib
import os
from typing import NoReturn

live_on: set[int] = set()  # descriptors of terminals; the cursor is at the start of a live line

_ERASE_BELOW = b"\r\x1b[J"


def exit_at_once(code: int) -> NoReturn:
    """Erases the live line, if there is one, and ends the process; nothing is waited for.

    Args:
        code: the exit code.
    """
    for descriptor in tuple(live_on):
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(descriptor, _ERASE_BELOW)
    os._exit(code)
