"""Kernels in a program for several devices: each runs them on its examples and heads."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_the_kernels_divided_over_a_mesh_are_plain_attention():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jax_kernels"],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    cases = {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}
    assert set(cases) == {"causal", "packed", "one_column", "three_examples", "whole"}
    for name, (difference, *divided) in cases.items():
        assert float(difference) < 2e-5, name
        assert divided == ["backward", "forward"], name
