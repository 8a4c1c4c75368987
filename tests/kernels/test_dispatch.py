"""Keras's own attention runs the flash kernel in programs for a TPU.

Evidence: executed (interpreted on a CPU).
"""

import inspect
import json
import types
from unittest import mock

import numpy as np
import pytest

from tests.support.models.kernels import interpreted
from tests.support.programs import jax_process
from tftpu import sharding
from tftpu.kernels import dispatch, keras_hub_internals

__all__ = ["interpreted"]  # a fixture
TIME, WINDOW = 256, 60
SINKS = np.array([-1.0, 2.0], "float32")
CAUSAL = np.tril(np.ones((TIME, TIME), bool))


def attend_by_definition(query, key, value, mask, window):
    """Returns what GptOss's layers compute: the last score is the sink's, whose value is zero."""
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    places = np.arange(TIME)
    near = places[None] >= places[:, None] - window if window > 0 else True
    seen = np.broadcast_to(mask & near, (len(query), TIME, TIME))[:, None]
    weights = np.exp(np.where(seen, scores, -1e9))
    total = weights.sum(-1, keepdims=True) + np.exp(SINKS)[:, None, None]
    return np.einsum("bhqk,bkhd->bqhd", weights / total, value)


@pytest.mark.medium
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("window", [WINDOW, 0, -1])
@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL & (np.arange(TIME) < np.array([[[TIME]], [[150]]])),
        CAUSAL[None],
        np.arange(TIME)[None, None] < np.array([[[TIME]], [[193]]]),
    ],
    ids=["causal and padded", "for all examples", "padding alone"],
)
def test_attention_with_sinks_is_that_of_its_definition(mask, window):
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(2, TIME, 2, 64)).astype("float32") for _ in range(3)]
    with sharding.compiling_for("tpu"):
        found = dispatch.attend_with_sinks(mock.Mock(), SINKS, window, *given, mask)
    expected = attend_by_definition(*given, mask, window)
    seen = np.broadcast_to(mask, (2, TIME, TIME)).any(-1)
    np.testing.assert_allclose(np.asarray(found)[seen], expected[seen], atol=2e-6)


@pytest.mark.medium
def test_keras_hub_computes_attention_with_sinks_where_it_is_replaced():
    hub = pytest.importorskip("keras_hub.src.models.gpt_oss.gpt_oss_attention")
    own = hub.GptOssAttention._compute_attention
    taken = ["self", "query", "key", "value", "attention_mask", "start_index"]
    assert list(inspect.signature(own).parameters) == taken
    layer = types.SimpleNamespace(sinks=SINKS, sliding_window=None)
    with keras_hub_internals.replacing_sink_attention(lambda *given: given[1:]):
        assert hub.GptOssAttention._compute_attention(layer, 1, 2) == (SINKS, 0, 1, 2)
    assert hub.GptOssAttention._compute_attention is own


def test_what_the_kernel_does_not_take_is_left_to_the_layer():
    query = np.zeros((1, 1, 2, 64), "float32")
    key = np.zeros((1, TIME, 2, 64), "float32")
    mask = np.ones((1, 1, TIME), bool)
    whole = [np.zeros((1, TIME, 2, 64), "float32")] * 3
    for platform, arguments in [
        ("tpu", (query, key, key, mask, 7)),  # a token after others
        ("tpu", (*whole, None, 0)),
        ("cpu", (*whole, CAUSAL[None], 0)),
    ]:
        own = mock.Mock(return_value="its own")
        with sharding.compiling_for(platform):
            assert dispatch.attend_with_sinks(own, SINKS, WINDOW, *arguments) == "its own"
        own.assert_called_once_with(*arguments)


@pytest.mark.exhaustive
def test_models_of_keras_hub_attend_by_the_kernel_and_give_their_own_numbers():
    printed = jax_process.output("hub.attention")
    cases = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(cases) == 4
    for case in cases:
        assert case["calls"] == 2, case  # one for each layer
        assert case["difference"] < 1e-5, case
