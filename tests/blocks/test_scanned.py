"""Blocks that run as one loop over their stacked weights."""

import json

import numpy as np
import pytest

from tests.support.programs import jax_process
from tftpu import models
from tftpu.errors import UserError

USUAL = ("gpt", "gpt with inputs on the host")
OTHERS = ("gpt recomputed", "gpt with its products", "llama", "bert", "vit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "count"), [(USUAL, 3), pytest.param(OTHERS, 5, marks=pytest.mark.exhaustive)]
)
def test_the_loop_gives_the_numbers_of_the_single_blocks_in_a_shorter_program(names, count):
    printed = jax_process.output("programs.jax_scan", *names)
    *found, kept, whole, kernels, drawn = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == count
    for case in found:
        assert case["difference"] < 2e-6, case
        assert case["length"] < 0.6, case  # of eight blocks, with their stacking
        offloads = case["model"] == "gpt with inputs on the host"
        assert case["host"] == [offloads, offloads], case
    for scan in ("none", "block"):
        most, some, least = (kept[f"{scan} {remat}"] for remat in ("none", "products", "block"))
        assert least < 0.5 * some and some < 0.8 * most, kept
    assert whole == {"none": 0, "block": 0}  # they are gathered again
    assert kernels["none"] == kernels["attention"] == kernels["block"] - 1
    # The engine seeds each step; Keras's own `fit` relies on the states that a call leaves.
    np.testing.assert_allclose(drawn["block"], drawn["none"], rtol=1e-5, atol=1e-5)
    assert drawn["block"][0] != drawn["block"][1]


def test_keeping_products_needs_jax():
    with pytest.raises(UserError, match=r"model\.remat='products' works only on the JAX engine"):
        models.build("gpt2_small", remat="products", layers=2, width=32, heads=2, vocabulary=8)


def test_a_loop_that_is_asked_for_needs_jax():
    with pytest.raises(UserError, match=r"model\.scan='block' works only on the JAX engine"):
        models.build("gpt2_small", scan="block", layers=2, width=32, heads=2, vocabulary=8)


def test_a_misspelled_mode_is_refused():
    with pytest.raises(UserError, match=r"There is no model\.scan 'blocks'"):
        models.build("gpt2_small", scan="blocks", layers=2, width=32, heads=2, vocabulary=8)
