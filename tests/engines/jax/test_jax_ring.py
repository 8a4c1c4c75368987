"""Attention over sequences that devices share: a ring of them computes what one device does."""

import pytest

from tests.support.programs import jax_process

pytestmark = pytest.mark.slow


def test_a_ring_of_devices_computes_plain_attention_and_its_gradients():
    printed = jax_process.output("programs.jax_ring")
    cases = {name: rest for name, *rest in map(str.split, printed.splitlines())}
    assert set(cases) == {"causal", "packed", "grouped"}
    for name, (difference, exchanges) in cases.items():
        assert float(difference) < 1e-5, name
        # Two halves of queries, keys, values, outputs, and in two places what travels on: keys and
        # values of two chunks. Segments come on top.
        assert int(exchanges) == (24 if name == "packed" else 16), name
