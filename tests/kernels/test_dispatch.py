"""Keras's own attention runs the flash kernel in programs for a TPU.

Evidence: executed (interpreted on a CPU).
"""

import json

import pytest

from tests.support.programs import jax_process


@pytest.mark.exhaustive
def test_models_of_keras_hub_attend_by_the_kernel_and_give_their_own_numbers():
    printed = jax_process.output("hub.attention")
    cases = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(cases) == 4
    for case in cases:
        assert case["calls"] == 2, case  # one for each layer
        assert case["difference"] < 1e-5, case
