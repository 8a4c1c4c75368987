"""The price of text that a language model writes."""

import keras
import pytest

from tftpu import models
from tftpu.errors import UserError
from tftpu.models.sizes import GPT
from tftpu.preflight.writing import check_writing

SIZES = {"vocabulary": 512, "context": 256, "layers": 2, "width": 256, "heads": 4}


def gpt(**fields: int) -> keras.Model:
    return models.build(GPT("tiny", **{**SIZES, **fields}))


@pytest.mark.slow
@pytest.mark.compiles
def test_tokens_a_second_and_dollars_follow_from_the_time_of_a_token():
    one, eight, dear = [
        *check_writing(gpt, ["v5e-1", "v5e-8"], 8),
        *check_writing(gpt, ["v5e-1"], 8, prices={"v5e": 3.6}),
    ]
    assert one.token_ms is not None and one.token_ms_low is not None and not one.error
    assert one.token_ms_low < one.token_ms < (one.token_ms_high or 0)
    assert one.tokens_per_second == pytest.approx(8 / one.token_ms * 1e3)
    assert eight.tokens_per_second == pytest.approx(8 * (one.tokens_per_second or 0), rel=0.01)
    assert eight.usd_per_million == pytest.approx(one.usd_per_million, rel=0.01)
    assert dear.usd_per_million == pytest.approx(1e6 * 0.001 / (one.tokens_per_second or 1))
    cache = 8 * 256 * 2 * 2 * 256 * 2  # rows, slots, layers, keys and values, width, bytes
    weights = sum(v.shape[0] * (v.shape[1] if len(v.shape) > 1 else 1) * 4 for v in gpt().weights)
    assert weights + cache < one.hbm_bytes < 3 * (weights + cache)


@pytest.mark.slow
@pytest.mark.compiles
def test_more_rows_take_longer_together_and_less_each():
    [few], [many] = check_writing(gpt, ["v6e-1"], 8), check_writing(gpt, ["v6e-1"], 256)
    assert few.token_ms and many.token_ms
    assert few.token_ms < many.token_ms < 32 * few.token_ms


@pytest.mark.compiles
@pytest.mark.slow
def test_rows_that_do_not_fit_are_said_so():
    [found] = check_writing(gpt, ["v2-8"], 1 << 17)
    assert found.token_ms is None and found.error.startswith("does not fit")


def test_what_cannot_write_is_refused():
    def classifier() -> keras.Model:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    with pytest.raises(UserError, match=r"cannot write texts with the model"):
        check_writing(classifier, ["v5e-1"], 1)
    with pytest.raises(UserError, match=r"rows=0: give the number of texts"):
        check_writing(gpt, ["v5e-1"], 0)


@pytest.mark.slow
@pytest.mark.compiles
def test_a_context_shorter_than_the_loop_is_priced():
    [found] = check_writing(lambda: gpt(context=32), ["v5e-1"], 8)
    assert found.context == 32 and found.token_ms
