"""Tests on drawn and damaged inputs: a few in the default tests, many in `make fuzz`."""

import contextlib
import copy
import functools
import inspect
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import strategies as st

from tftpu.errors import UserError

# Seconds for each test; 0: the quick set, the same inputs each time.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
TRIED: dict[str, int] = {}  # inputs, by the test's name; `tests/fuzz/conftest.py` prints them
_ROUND = 10  # quick sets between two looks at the clock


def fuzzed(quick: int, **inputs: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Runs a test on many inputs; its other arguments are fixtures of pytest.

    Args:
        quick: number of inputs in the default tests.
        **inputs: strategies of hypothesis, by the names of the test's arguments.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            name = f"{test.__module__}.{test.__name__}"
            TRIED[name] = 0

            def once(**drawn: Any) -> None:
                TRIED[name] += 1
                test(**fixtures, **drawn)

            end = time.monotonic() + SECONDS
            seed = time.time_ns() if SECONDS else 0
            while True:
                settings = hypothesis.settings(
                    max_examples=_ROUND * quick if SECONDS else quick,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(hypothesis.HealthCheck),
                )
                hypothesis.seed(seed)(settings(hypothesis.given(**inputs)(once)))()
                seed += 1
                if time.monotonic() >= end:
                    break

        parameters = inspect.signature(test).parameters.values()
        del run.__wrapped__
        run.__signature__ = inspect.Signature([p for p in parameters if p.name not in inputs])
        return run

    return decorate


@contextlib.contextmanager
def only_user_errors(memory: int = 1 << 30) -> Iterator[None]:
    """Accepts a `UserError` that can be printed, and no other error.

    Args:
        memory: bytes that the block may allocate; more is a `MemoryError`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    try:
        yield
    except UserError as error:
        assert str(error).encode().strip()  # also: no lone surrogates, which no terminal shows
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def damaged(draw: Callable, whole: bytes) -> bytes:
    """Draws a damaged copy: bits flipped, and spans replaced, removed, repeated or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(begin + draw(st.sampled_from((1, 2, 4, 8, 64))), len(data))
        kind = draw(st.sampled_from(("flip", "replace", "remove", "repeat", "cut")))
        if kind == "flip" and begin < len(data):
            data[begin] ^= 1 << draw(st.integers(0, 7))
        elif kind == "replace":
            data[begin:end] = draw(st.binary(max_size=16) | st.just(b"\xff" * (end - begin)))
        elif kind == "remove":
            del data[begin:end]
        elif kind == "repeat":
            data[begin:begin] = data[begin:end]
        elif kind == "cut":
            del data[begin:]
    return bytes(data)


# Any JSON, with the values that parsers stumble over.
_ODD = st.sampled_from(
    (-1, 0, 2**31, 2**63, 2**64, 10**30, float("nan"), float("inf"), "", "../x", "/x", "\ud800")
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | _ODD,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def reshaped(draw: Callable, value: Any) -> Any:
    """Draws a copy of a JSON value with one to three parts replaced by any JSON, or removed."""
    value = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        place = value
        key: Any = ""
        while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(list(keys)))
        if draw(st.booleans()) or not key:
            place[key] = draw(ANY_JSON)
        else:
            del place[key]
            if not place:
                break
    return value.get("")
