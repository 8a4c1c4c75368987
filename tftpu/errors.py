"""Exceptions that end a run with a clear message instead of a traceback, and exit codes."""

import difflib
import enum
import re
from collections.abc import Iterable, Sequence


class ExitCode(enum.IntEnum):
    """The exit codes of `tftpu`."""

    DONE = 0
    BUG = 1  # a bug in tftpu, with a traceback
    USER_ERROR = 2
    HOST_LOST = 69  # EX_UNAVAILABLE: another host of the run, or a bucket
    PREEMPTED = 75  # EX_TEMPFAIL: the run stopped and saved; the same command resumes it
    HUNG = 124  # the exit code of timeout(1): --watchdog ended the run
    INTERRUPTED = 130


class UserError(Exception):
    """A mistake that the user can fix. The command line prints its message and exits with 2.

    Args:
        message: the text to print. Characters that UTF-8 cannot encode are escaped, such as an
            invalid byte in a file's name.
    """

    def __init__(self, message: str):
        super().__init__(message.encode(errors="backslashreplace").decode())


class NotFiniteError(UserError):
    """A model predicts NaN or infinite values, so it cannot generate the next token.

    Attributes:
        rows: indices of the prompts with such predictions, in the order of the request.
        texts: the tokens generated so far for each prompt, if `tftpu.generate` raised the error.
    """

    def __init__(self, rows: Sequence[int] = (), texts: Sequence[list[int]] = ()):
        self.rows, self.texts = rows, texts
        super().__init__(
            "The model predicts values that are not finite, so no token can be drawn: the "
            "cause is in its weights or its precision."
        )


class KerasError(UserError, ValueError):
    """A user error that is also a `ValueError`, as code written for Keras expects."""


class OwnStepsNeeded(UserError):  # noqa: N818 (the name says what is needed)
    """The engine's step cannot train a model on its data; the model's `train_step` perhaps can."""


class DivergedError(UserError):
    """The loss of a run is not finite, and the run has no rollback or no checkpoint left to try."""


class Preempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The run was asked to stop and saved its state; the command line exits with 75.

    Args:
        reason: the name of a signal, or "a maintenance event".
        step: the step that the run stopped after.
        saved: the step of the newest checkpoint; None: there is none.
    """

    def __init__(self, reason: str, step: int, saved: int | None):
        if saved == step:
            kept = "saved: the same command resumes from there"
        elif saved is None:
            kept = "not saved: there is no checkpoint"
        else:
            kept = f"which could not be saved: the same command resumes from step {saved}"
        self.reason = reason
        super().__init__(f"Stopped by {reason} after step {step}, {kept}.")


class HostLost(Exception):  # noqa: N818 (an outcome, not an error)
    """Another host of the run failed; the command line exits with 69."""


def find_first_line(error: Exception) -> str:
    """Returns the first line of an error's message; the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 shard", "2,000 shards", "3 classes", "2 epochs"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Returns a sentence for the end of an error: the nearest allowed name, or all if none is near.

    Args:
        given: the name that the user wrote.
        allowed: the names that would have been accepted.

    Returns:
        " Did you mean 'x'?" or " Allowed: x, y, z.", with the leading space; "" if none is allowed.
    """
    allowed = sorted(allowed)
    near = find_nearest(given, allowed)
    if near is not None:
        return f" Did you mean {near!r}?"
    return f" Allowed: {', '.join(allowed)}." if allowed else ""


def find_nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Returns the allowed name that is most similar to a given one; None if none is similar."""
    allowed = list(allowed)
    # A name that contains all parts of the given one ("mixed_float16" for "float16") is a better
    # suggestion than a similar name ("float32").
    near = [name for name in allowed if _split_words(name).issuperset(_split_words(given))]
    if len(near) != 1 and len(given) > 2:  # a beginning: "temp" for "temperature"
        near = [name for name in allowed if name.startswith(given)]
    if len(near) != 1:
        near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.6)
    return near[0] if near and _is_near(given, near[0]) else None


def _is_near(given: str, name: str) -> bool:
    """Returns whether a name is similar enough to suggest it; for "stop", "top_p" is not."""
    if given in name or name in given or sorted(given) == sorted(name):
        return True
    return difflib.SequenceMatcher(None, name, given).ratio() >= 0.7


def _split_words(name: str) -> set[str]:
    """Returns the words of a name such as "mean_squared_error" or "MeanSquaredError"."""
    return set(re.split(r"_|(?<=[a-z])(?=[A-Z])", name))
