"""The interpreter ends, whatever still reads ahead."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # processes that import TensorFlow


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(("devices", "place"), [(1, "evaluation"), (4, "training")])
def test_a_process_ends_after_a_fit_that_an_error_ended(backend, devices, place):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.failing_fit", str(devices), place],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: the end")
