"""The experts of the published mixture's workload."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.benchmarks.calibration.mixture import Experts


@pytest.mark.parametrize(("spare", "passed"), [(1.25, 0), (0.875, 16), (0.5, 64)])
def test_experts_take_their_tokens_in_order_until_they_are_full(spare, passed):
    keras.utils.set_random_seed(0)
    layer = Experts(experts=4, hidden=16, spare=spare)
    x = np.random.RandomState(0).randn(2, 32, 8).astype("float32")
    layer.build(x.shape)
    found = keras.ops.convert_to_numpy(layer(x))
    expected, left_out = compute_one_by_one(layer, x, int(np.ceil(16 * spare)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert left_out == passed


def compute_one_by_one(layer: Experts, x: Any, capacity: int) -> tuple[np.ndarray, int]:
    """Returns what the layer returns, and the number of tokens that found an expert full."""
    weights: Any = [layer.router.kernel, layer.gate, layer.expand, layer.contract]
    arrays: list[Any] = [keras.ops.convert_to_numpy(value) for value in weights]
    router, gate, expand, contract = arrays
    found, left_out = np.zeros_like(x), 0
    for example, tokens in enumerate(x):
        taken = np.zeros(len(gate), int)
        for place, token in enumerate(tokens):
            scores = token @ router
            chosen = np.argsort(-scores)[:2]
            shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
            for expert, share in zip(chosen, shares):
                taken[expert] += 1
                if taken[expert] > capacity:
                    left_out += 1
                    continue
                hidden = token @ gate[expert]
                hidden = hidden / (1 + np.exp(-hidden)) * (token @ expand[expert])
                found[example, place] += share * (hidden @ contract[expert])
    return found, left_out
