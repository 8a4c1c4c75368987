"""The benchmark of the start replaces functions by their names: each part has to be seen."""

import pytest

from tests.benchmarks import startup


@pytest.mark.slow
def test_every_part_of_the_start_is_measured():
    parts, first_line = startup._parts()
    assert parts.keys() == startup.PARTS.keys()
    assert all(part.wall > 0 for part in parts.values()) and first_line > 0
