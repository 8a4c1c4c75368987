"""The retry policy for requests to buckets, of Google's client and of TensorFlow's."""

import functools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.api_core.retry import Retry

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Separate from Python's global generator. Keras draws the seeds of initial weights from the global
# one, and a thread that waits for a bucket would change them.
_RANDOM = random.Random()


@dataclass(frozen=True)
class Policy:
    """Limits of the retries of a request while the bucket is busy or out of reach.

    Attributes:
        seconds: time limit, after which the last error is raised.
        first_wait: seconds before the second try; doubled after each.
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
        function: makes the request; safe to repeat.
        transient: the errors that may disappear when the call is repeated.
        target: the object of the request, for the log.
        tries: maximum number of calls, for errors that waiting does not fix; None: any number.

    Raises:
        Exception: the last transient error, or the first of any other kind.
    """
    end, wait, made = time.monotonic() + POLICY.seconds, POLICY.first_wait, 0
    while True:
        made += 1
        try:
            return function()
        except transient as error:
            if made == tries or time.monotonic() + wait > end:
                raise
            _warn(target, error)
        # A random wait, so that hosts do not all retry at once.
        time.sleep(wait * _RANDOM.uniform(0.5, 1.0))
        wait = min(2 * wait, POLICY.longest_wait)


def for_google_client(target: str) -> "Retry":
    """Returns the policy for Google's storage client, which repeats parts of an upload itself.

    Writes are retried as well: each carries a generation, so that it takes effect once, or replaces
    whatever there is.

    Args:
        target: the object of the request, for the log.
    """
    from google.cloud.storage import retry

    policy = retry.DEFAULT_RETRY.with_delay(
        initial=POLICY.first_wait, multiplier=2, maximum=POLICY.longest_wait
    ).with_timeout(POLICY.seconds)
    policy._on_error = functools.partial(_warn, target)  # the policy has no public method for this
    return policy


def _warn(target: str, error: Exception) -> None:
    _log.warning("%s failed (%s): retrying.", target, type(error).__name__)
