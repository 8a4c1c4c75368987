"""Cases of a test, of which a few that differ in kind are usual."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_rare(cases: Iterable[str], usual: Collection[str]) -> list[Any]:
    """Returns the names of cases, those that are not usual marked `exhaustive`."""
    names = list(cases)
    assert set(usual) <= set(names)  # a misspelled one would be tried by nobody
    return [n if n in usual else pytest.param(n, marks=pytest.mark.exhaustive) for n in names]
