"""The script that measures how long training waits for a checkpoint, on a small state."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_there_is_one_copy_and_it_is_faster_than_the_save():
    """The figures are for a quiet machine; only bounds that hold on any machine are tested."""
    command = [sys.executable, "-m", "tests.benchmarks.checkpoint_stall", "--parameters=2e7"]
    done = subprocess.run(
        [*command, "--rounds=2", "--head_start=1"], capture_output=True, text=True, check=False
    )
    found = re.search(
        r"waits (\d+) ms \(the whole save takes (\d+) ms\).*memory ([\d.]+) copies", done.stdout
    )
    assert found, done.stdout + done.stderr
    assert float(found[1]) < 0.5 * float(found[2])
    # The state is 0.23 GiB, and some MiB are the pieces that are being written.
    assert float(found[3]) < 1.3
