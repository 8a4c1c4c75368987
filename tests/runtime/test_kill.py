"""Real processes, really killed: the script that does it a hundred times, five times here."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_killed_and_stopped_runs_end_as_if_nothing_had_happened():
    """In a process of its own: it forks, which one that uses TensorFlow may not."""
    command = [sys.executable, "-m", "tests.benchmarks.kill", "--kills=5", "--terms=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert said.startswith("5 runs killed (")
    assert "5 ended equal to the bit; 5 stopped by SIGTERM: 5 exited with 75, 5 lost no" in said
