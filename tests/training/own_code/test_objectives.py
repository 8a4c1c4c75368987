"""How the updates of several objectives go together, against the same written by hand."""

import json
import os
import sys

import pytest

from tests.support import warm

PROGRAM = "tests.support.programs.own_code.objective_updates"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_simultaneous_shared_and_unregularized_objectives_equal_those_by_hand(backend):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    command = [sys.executable, "-m", PROGRAM]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert max(printed["found"].values()) < 1e-6, printed
    assert printed["least apart"] > 1e-3
