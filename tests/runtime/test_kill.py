"""Real processes are killed, by the script that does so a hundred times; five times here."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_killed_and_stopped_runs_finish_like_undisturbed_ones():
    """Runs in a separate process: it forks, which a process with TensorFlow must not."""
    command = [sys.executable, "-m", "tests.benchmarks.faults.kill", "--kills=5", "--terms=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert said.startswith("5 runs killed (")
    assert "5 ended equal to the bit; 5 stopped by SIGTERM: 5 exited with 75, 5 lost no" in said


@pytest.mark.slow
def test_killed_runs_of_an_own_step_and_a_generator_finish_like_an_undisturbed_one():
    command = [sys.executable, "-m", "tests.benchmarks.faults.kill", "--kills=3", "--terms=1"]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ended equal to the bit; 1 stopped by SIGTERM: 1 exited with 75" in done.stdout
