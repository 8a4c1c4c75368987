"""The permutation that shuffles a conversion."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tftpu.input_pipelines.reading.permutation import Permutation


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(-(2**40), 2**70))
def test_a_permutation_has_every_number_once_and_an_inverse(count, seed):
    places = np.arange(count)
    there = Permutation(count, seed).forward(places)
    assert sorted(there.tolist()) == list(range(count))
    assert Permutation(count, seed).invert(there).tolist() == places.tolist()


def test_a_very_large_permutation_is_computed_element_by_element():
    places = np.array([0, 1, 10**15 - 1])
    permutation = Permutation(10**15, 3)
    assert permutation.invert(permutation.forward(places)).tolist() == places.tolist()
    # Numbers do not correlate with their positions.
    values = Permutation(10_000, 0).forward(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.03
    assert (Permutation(10_000, 1).forward(np.arange(10_000)) == values).mean() < 0.01
