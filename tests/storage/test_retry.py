"""One retry policy serves both clients of buckets."""

import subprocess
import sys
import time

import pytest

from tftpu.storage import retry


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(retry, "POLICY", retry.Policy(0.2, first_wait=0.01, longest_wait=0.04))


def failing(*errors: Exception):
    """Returns a request that raises errors in turn, and then succeeds."""
    left = list(errors)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return request


WAITING = """
import random
from tftpu.storage import retry

def request():
    if errors:
        raise errors.pop()

errors = [TimeoutError(), TimeoutError()]
retry.POLICY = retry.Policy(first_wait=0.01)
before = random.getstate()
retry.call(request, (TimeoutError,), "gs://b/name")
assert not errors and random.getstate() == before
"""


def test_waits_draw_nothing_from_the_generator_that_seeds_weights():
    """In its own process: threads of other tests may draw from the global generator."""
    subprocess.run([sys.executable, "-c", WAITING], check=True)


def test_transient_errors_are_retried_until_the_request_succeeds(caplog, monkeypatch):
    monkeypatch.setattr(retry, "POLICY", retry.Policy(30, first_wait=0.01))
    request = failing(TimeoutError(), TimeoutError())
    assert retry.call(request, (TimeoutError,), "gs://b/name") == "done"
    assert caplog.text.count("gs://b/name failed (TimeoutError): retrying for up to 30 s.") == 1
    assert caplog.text.count("retrying") == 1


def test_a_request_that_keeps_failing_is_reported_now_and_then_and_its_cause_once(
    caplog, monkeypatch
):
    monkeypatch.setattr(retry, "_QUIET", 0.06)
    errors = [ConnectionError("no route\nto the host")] * 1000
    with pytest.raises(ConnectionError):
        retry.call(failing(*errors), (ConnectionError,), "gs://b/name")
    first, *later = caplog.messages
    assert "failed (ConnectionError: no route to the host): retrying for up to 0.2 s." in first
    assert 1 <= len(later) <= 3
    assert all("gs://b/name still fails (ConnectionError) after" in line for line in later)


def test_any_other_error_is_raised_at_once(caplog):
    with pytest.raises(PermissionError):
        retry.call(failing(PermissionError()), (TimeoutError,), "gs://b/name")
    assert not caplog.text


def test_after_the_policys_time_limit_the_last_error_is_raised():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        retry.call(failing(*[TimeoutError()] * 1000), (TimeoutError,), "gs://b/name")
    assert 0.1 < time.monotonic() - began < 10


def test_an_error_that_waiting_does_not_fix_has_limited_tries(caplog):
    with pytest.raises(ValueError, match="third"):
        errors = ValueError("first"), ValueError("second"), ValueError("third")
        retry.call(failing(*errors), (ValueError,), "gs://b/name", tries=3)
    assert caplog.text.count("retrying") == 1


def test_googles_client_follows_the_same_policy():
    policy = retry.for_google_client("gs://b/name")
    assert (policy._initial, policy._maximum, policy.timeout) == (0.01, 0.04, 0.2)
