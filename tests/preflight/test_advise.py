"""Advice: the search for a batch that fits, out-of-memory messages, and lints."""

import dataclasses

import pytest

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.advise import (
    MAX_COMPILES,
    batch_step,
    find_largest_batch,
    find_lints,
    parse_memory_error,
)
from tftpu.preflight.pricing.cost import Cost, Memory
from tftpu.preflight.pricing.instructions import Priced


@pytest.mark.parametrize("edge", [8, 16, 248, 1000, 2504, 4088])
@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_the_search_finds_the_edge_however_memory_grows(edge, power):
    tried = []

    def bytes_at(batch):
        return int(1e6 + 1e6 * batch**power)

    def need(batch):
        tried.append(batch)
        return batch <= edge, bytes_at(batch)

    limit = bytes_at(edge + 4)
    assert find_largest_batch(need, 4096, bytes_at(4096), limit, 8) == (edge, edge + 8)
    assert len(tried) == len(set(tried)) <= MAX_COMPILES


def test_a_jump_in_memory_does_not_mislead_the_search():
    # Near the limit the compiler trades time for memory: a larger batch needs no more bytes.
    def need(batch):
        return batch <= 800, 7_900 if 400 < batch <= 800 else 10 * batch

    assert find_largest_batch(need, 1024, 10_240, 8_000, 8) == (800, 808)


def test_the_search_reports_that_nothing_fits():
    assert find_largest_batch(lambda batch: (False, 10**9), 64, 10**9, 10**6, 8) == (0, 8)
    assert find_largest_batch(lambda batch: (False, 10**9), 6, 10**9, 10**6, 4) == (0, 4)
    assert find_largest_batch(lambda batch: (False, 10**9), 6, 10**9, 10**6, 8) == (0, 6)


@pytest.mark.parametrize(
    ("examples", "unit", "step"),
    [(4096, None, 8), (64, None, 8), (63, None, 4), (8, None, 1), (1, None, 1)]
    + [(64, 32, 32), (32, 32, 32), (20_000, None, 32), (100_000, 16, 128)],
)
def test_small_batches_are_searched_in_small_steps(examples, unit, step):
    assert batch_step(examples, unit) == step


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (240.00G) exceeds available HBM (7.48G).",
            (240.0, 7.48),
        ),
        (
            "Ran out of memory in memory space hbm. Used 17.2G of 15.75G hbm. Exceeded",
            (17.2, 15.75),
        ),
    ],
)
def test_an_out_of_memory_message_is_parsed(message, gib):
    assert parse_memory_error(message) == tuple(int(size * 2**30) for size in gib)


def test_a_message_without_figures_is_not_an_error():
    assert parse_memory_error("RESOURCE_EXHAUSTED: no idea") is None


def test_float16_and_a_ragged_microbatch_are_findings_about_the_step():
    step = LoweredStep(program=b"", arguments=[], precision="mixed_float16")
    memory = Memory(0, 0, 0, 0, 0)
    cost = Cost(memory, [], [], 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, ["while.1", "while.2"], ["a"])
    loops, kernels, ragged, float16 = (str(item) for item in find_lints(step, cost, 20))
    assert "2 loops of unknown trip count" in loops
    assert "20 examples does not fill tiles of 8" in ragged and "as 24" in ragged
    assert "mixed_bfloat16" in float16
    assert "kernels in 'a'" in kernels
    counted = dataclasses.replace(cost, uncounted_loops=[], silent_kernels=[])
    assert find_lints(dataclasses.replace(step, precision="mixed_bfloat16"), counted, 16) == []


FORWARD = """\
ENTRY %main (a: f32[8,200]) -> f32[8,10] {
  %a = f32[8,200]{1,0} parameter(0)
  %w = f32[200,10]{1,0} parameter(1)
  ROOT %out = f32[8,10]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(("share", "found"), [(0.06, ["body"]), (0.04, [])])
def test_only_layers_that_matter_and_whose_width_is_chosen_are_told_of_empty_lanes(share, found):
    step = LoweredStep(
        program=b"",
        forward=FORWARD,
        arguments=[],
        layers={"body": "Dense", "adapted": "Dense", "head": "Dense"},
        kernels={
            "body/kernel": (64, 200),
            "adapted/kernel": (64, 256),
            "adapted/lora_a": (64, 16),  # the rank of an adapter is small on purpose
            "head/kernel": (200, 10),
        },
        precision="float32",
    )
    spent = {"body": share, "adapted": 0.5, "head": 0.4, "": 1 - 0.9 - share}
    instructions = [Priced(n, "matrix", n, "", 1, s, 0, 0, 0) for n, s in spent.items()]
    cost = Cost(Memory(0, 0, 0, 0, 0), [], instructions, *[0] * 4, *[1.0] * 5, [], [])
    assert [item.layer for item in find_lints(step, cost, 16)] == found


def test_an_op_that_became_a_loop_of_many_short_iterations_is_named():
    def spent(name: str, times: int, seconds: float) -> Priced:
        return Priced(name, "elementwise", "up", "tape/up/ResizeGrad", times, seconds, 0, 0, 0)

    step = LoweredStep(program=b"", arguments=[], precision="float32")
    body = [spent("a", 20_000, 0.02), spent("b", 20_000, 0.02)]
    rest = spent("c", 9_999, 0.06)
    cost = Cost(Memory(0, 0, 0, 0, 0), [], [*body, rest], *[0] * 4, *[1.0] * 5, [], [])
    [found] = find_lints(step, cost, 16)
    assert str(found).startswith(
        "layer 'up' (40% of the step): ResizeGrad runs as 20,000 iterations of 2 us, one after "
    )
