"""Own steps on the JAX engine: variables that a compiled step cannot follow are refused by name."""

import json

import pytest

from tests.support.programs import jax_process


@pytest.mark.slow
def test_variables_outside_of_the_state_are_refused_by_name():
    found = json.loads(jax_process.output("programs.own_code.outside"))
    assert found.pop("none") == found.pop("tuples") == ""
    assert "returns a state of [2, " in found.pop("too few")
    assert "reads the variable 'own_" in found["the model's own"]
    assert "kernel' from the model" in found.pop("the model's own")
    for case in ("read and changed", "read in a test"):
        assert "reads the variable 'outside', which has changed" in found.pop(case)
    for case in ("assigned", "assigned in call"):
        assert "assigns the variable 'outside' outside of the state" in found.pop(case)
    assert not found
