"""The policy for retries of requests to buckets, by Google's client and by TensorFlow."""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.api_core.retry import Retry

_log = logging.getLogger(__name__)
_LONGEST = 300  # characters of an error in a warning
_QUIET = 60.0  # seconds between two warnings about a request
_T = TypeVar("_T")

# Separate from Python's global generator. Keras draws the seeds of initial weights from the global
# one, and a thread that waits for a bucket would change them.
_RANDOM = random.Random()


@dataclass(frozen=True)
class Policy:
    """Limits of the retries of a request while the bucket is busy or out of reach.

    Attributes:
        seconds: time limit, after which the last error is raised.
        first_wait: maximum seconds before the second try; doubled after each try.
        longest_wait: maximum seconds between two tries.
    """

    seconds: float = 300.0
    first_wait: float = 0.5
    longest_wait: float = 20.0


POLICY = Policy()


def call(
    function: Callable[[], _T],
    transient: tuple[type[Exception], ...],
    target: str,
    tries: int | None = None,
) -> _T:
    """Calls a function until it succeeds, or until the policy's time is up.

    Args:
        function: a function that makes the request, and is safe to repeat.
        transient: the errors that may disappear when the call is repeated.
        target: the address that is requested, for the log.
        tries: maximum number of calls, for errors that waiting does not fix; None: any number.

    Raises:
        Exception: the last transient error, or the first of any other kind.
    """
    end, wait, made = time.monotonic() + POLICY.seconds, POLICY.first_wait, 0
    warn = _build_warner(target)
    while True:
        made += 1
        try:
            return function()
        except transient as error:
            if made == tries or time.monotonic() + wait > end:
                raise
            warn(error)
        # A random wait, so that hosts do not all retry at once.
        time.sleep(wait * _RANDOM.uniform(0.5, 1.0))
        wait = min(2 * wait, POLICY.longest_wait)


def for_google_client(target: str) -> "Retry":
    """Returns the policy by which Google's client retries requests and chunks of uploads.

    Writes are retried as well. Repeating one is safe: it either requires a generation of the object
    and so takes effect once, or replaces any content.

    Args:
        target: the address that is requested, for the log.
    """
    from google.cloud.storage import retry

    policy = retry.DEFAULT_RETRY.with_delay(
        initial=POLICY.first_wait, multiplier=2, maximum=POLICY.longest_wait
    ).with_timeout(POLICY.seconds)
    policy._on_error = _build_warner(target)  # the policy has no public method for this
    return policy


def _build_warner(target: str) -> Callable[[Exception], None]:
    """Returns a function that logs the errors of a request: the first, and then one a minute."""
    first = last = -math.inf

    def warn(error: Exception) -> None:
        nonlocal first, last
        now, kind = time.monotonic(), type(error).__name__
        if now > first + POLICY.seconds:  # a new request: retries of the earlier one have ended
            first = last = now
            cause = " ".join(str(error).split())[:_LONGEST]
            reason = f"{kind}: {cause}" if cause else kind
            seconds = POLICY.seconds
            _log.warning("%s failed (%s): retrying for up to %g s.", target, reason, seconds)
        elif now > last + _QUIET:
            last = now
            _log.warning("%s still fails (%s) after %.0f s: retrying.", target, kind, now - first)

    return warn
