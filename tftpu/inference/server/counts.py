"""The server's metrics, in the text form of Prometheus."""

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

_LOG = logging.getLogger(__name__)
_BATCHES = tuple(2**n for n in range(12))


class Counts:
    """Counts requests and batches.

    Attributes:
        media_type: the media type of the result of `format_text`.
    """

    media_type = exposition.CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tftpu_requests",
            "Answers with predictions or text, and errors.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "tftpu_request_seconds", "From arrival to answer.", ["route"], registry=self._registry
        )
        self._batches = Histogram(
            "tftpu_batch_size",
            "Examples, or texts, of a batch.",
            buckets=_BATCHES,
            registry=self._registry,
        )
        self._failures = Counter(
            "tftpu_failures", "Failures of the model, streams included.", registry=self._registry
        )
        self._waiting = Gauge(
            "tftpu_waiting", "Examples, or texts, that wait.", registry=self._registry
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Counts an answer, and records its duration."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_refusal(self, status: int) -> None:
        """Counts an answer to an unknown address or a wrong method, under the route "other"."""
        self._requests.labels("other", str(status)).inc()

    def batch(self, size: int) -> None:
        """Records the size of a batch."""
        self._batches.observe(size)

    def set_gauge(self, waiting: Callable[[], int]) -> None:
        """Sets the function that returns the number of waiting examples or texts."""
        self._waiting.set_function(waiting)

    def log_failure(self, error: Exception) -> None:
        """Logs and counts an unexpected error."""
        self._failures.inc()
        _LOG.error("A request failed.", exc_info=error)

    def format_text(self) -> bytes:
        """Returns the metrics in the text form of Prometheus."""
        return exposition.generate_latest(self._registry)
