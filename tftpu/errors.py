"""The user's mistakes: one clear sentence each, never a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend. The command line prints it alone and exits with 2."""


class Preempted(BaseException):
    """The run was asked to stop and saved a checkpoint first; the command line exits with 75."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """A clause for the end of an error: the nearest allowed name, or all of them if few.

    Args:
        given: what the user wrote.
        allowed: the names that would have been accepted.

    Returns:
        " Did you mean 'x'?", or " Allowed: x, y, z.", with the leading space.
    """
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Allowed: {', '.join(allowed)}." if allowed else ""
