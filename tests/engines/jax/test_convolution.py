"""Convolutions of groups of channels, where devices hold the same examples."""

import json

import pytest

from tests.support.programs import jax_process


@pytest.fixture(scope="module")
def differences():
    return json.loads(jax_process.output("steps.convolutions").splitlines()[-1])


@pytest.mark.slow
def test_gradients_are_those_of_one_device(differences):
    assert len(differences["engine"]) == 72
    assert {n: d for n, d in differences["engine"].items() if not d < 1e-5} == {}


@pytest.mark.slow
def test_so_are_those_of_kernels_that_vmap_makes_groups_of(differences):
    assert len(differences["vmap"]) == 2
    assert {n: d for n, d in differences["vmap"].items() if not d < 1e-5} == {}


@pytest.mark.slow
def test_xla_multiplies_the_gradients_of_kernels(differences):
    """If this fails, XLA is repaired, and `convolve` need not divide."""
    wrong = [name for name, difference in differences["XLA"].items() if difference > 0.9]
    assert len(wrong) > 20
