"""Kernels in a program for several devices: each runs them on its examples and heads."""

import pytest

from tests.support.programs import jax_process

pytestmark = pytest.mark.slow


def test_the_kernels_divided_over_a_mesh_are_plain_attention():
    printed = jax_process.output("programs.jax_kernels")
    cases = {name: rest for name, *rest in map(str.split, printed.splitlines())}
    attention = {"causal", "packed", "grouped", "one_column", "three_examples", "whole"}
    rotary = {"rotary", "rotary_by_example"}
    assert set(cases) == attention | rotary
    for name, (difference, *divided) in cases.items():
        assert float(difference) < 2e-5, name
        assert divided == (["rotate"] if name in rotary else ["backward", "forward"]), name
