"""The closed forms of a plan, against figures by hand."""

import dataclasses

import pytest

from tftpu.engines.lowered import StateBytes
from tftpu.launch.plan.bounds import Facts, estimate
from tftpu.launch.plan.candidates import Candidate
from tftpu.tpu.slices import parse_slice

GIB = 2**30
# 8 billion parameters in float32 with Adam, 16 texts of 2,048 tokens, 32 blocks 4,096 wide.
FACTS = Facts(
    flops=1_475_475_884_998_656,
    examples=16,
    tokens=16 * 2048,
    input_bytes=32 * 2048 * 4096 * 2,
    parameters=30 * GIB // 4,
    weights=30 * GIB,
    trained=30 * GIB,
    blocks=False,
    statistics=False,
    states={
        "8 fsdp:8": StateBytes(30 * GIB // 8, 60 * GIB // 8, 0),
        "8 data:2,fsdp:4": StateBytes(30 * GIB // 4, 60 * GIB // 4, 0),
        "8 fsdp:4,tensor:2": StateBytes(30 * GIB // 8, 60 * GIB // 8, 0),
    },
)
PLAIN = Candidate("v6e-8", "fsdp:8", "block", 1, "flash")


def estimate_of(**changes):
    return estimate(dataclasses.replace(PLAIN, **changes), parse_slice("v6e-8"), FACTS, 21.6)


def test_the_least_memory_is_the_state_and_the_inputs_of_blocks():
    state = 90 * GIB // 8
    assert estimate_of().least_bytes == state + GIB  # two texts of half a GiB on each chip
    assert estimate_of(microbatches=2).least_bytes == state + GIB // 2
    assert estimate_of(remat="offload").least_bytes == state
    assert estimate_of(mesh="data:2,fsdp:4").least_bytes == 90 * GIB // 4 + GIB
    assert estimate_of(mesh="fsdp:4,tensor:2").least_bytes == state + GIB


def test_the_least_time_is_that_of_the_peak():
    assert estimate_of().least_seconds == pytest.approx(FACTS.flops / 8 / 918e12)
    light = dataclasses.replace(FACTS, flops=1)
    bound = estimate(PLAIN, parse_slice("v6e-8"), light, 21.6)
    # Weights are read, what the optimizer keeps is read and written.
    assert bound.least_seconds == pytest.approx((30 + 2 * 60) * GIB / 8 / 1638e9)


def test_what_recomputes_or_exchanges_more_is_likely_to_take_longer():
    plain = estimate_of()
    slow = parse_slice("v5e-8")  # whose memory is fast for its products
    kept = estimate(dataclasses.replace(PLAIN, remat="products"), slow, FACTS, 9.6)
    assert kept.likely_seconds < estimate(PLAIN, slow, FACTS, 9.6).likely_seconds
    assert estimate_of(microbatches=2).likely_seconds > plain.likely_seconds
    assert estimate_of(mesh="fsdp:4,tensor:2").likely_seconds > plain.likely_seconds
    assert plain.likely_seconds > plain.least_seconds


def test_several_microbatches_are_likely_to_keep_the_sums_of_their_gradients():
    one, two = estimate_of(remat="offload"), estimate_of(remat="offload", microbatches=2)
    assert two.likely_bytes == one.likely_bytes + 30 * GIB // 8 - GIB // 2


def test_what_keeps_more_is_likely_to_need_more_memory():
    order = [
        estimate_of(remat=r).likely_bytes
        for r in ("offload", "block", "attention", "products", "none")
    ]
    assert order == sorted(set(order))


def test_many_microbatches_cost_more_than_recomputing():
    data = {"8 data:8": StateBytes(30 * GIB, 60 * GIB, 0)}
    whole = dataclasses.replace(FACTS, states=FACTS.states | data, examples=256)
    plain = dataclasses.replace(PLAIN, mesh="data:8", remat="none", microbatches=32)
    target = parse_slice("v6e-8")
    once = dataclasses.replace(plain, microbatches=1)
    many, one = (estimate(each, target, whole, 21.6).likely_seconds for each in (plain, once))
    # Weights are read twice; sums of the gradients are written, read and written.
    assert many - one == pytest.approx((31 * 2 * 30 + 32 * 3 * 30) * GIB / 1638e9)
    recomputed = dataclasses.replace(once, remat="block")
    assert estimate(recomputed, target, whole, 21.6).likely_seconds < many


def test_the_likely_time_is_near_that_of_compiled_steps():
    """Llama, 64 x 2,048 tokens, 16 blocks 2,048 wide, by tftpu preflight, 2026-11-30."""
    states = {"8 fsdp:8": StateBytes(569_122_816, 1_138_245_636, 0)}
    sizes = {"examples": 64, "input_bytes": 2**27, "weights": 4_551_090_176}
    facts = dataclasses.replace(
        FACTS, flops=843_187_979_550_720, trained=4_551_090_176, states=states, **sizes
    )
    found = {}
    for name, remat, microbatches, seconds in (
        ("v6e-8", "products", 1, 0.278),
        ("v6e-8", "none", 2, 0.421),
        ("v5e-8", "products", 2, 0.822),
        ("v5e-8", "block", 1, 0.895),
        ("v5e-8", "none", 4, 1.06),
    ):
        one = Candidate(name, "fsdp:8", remat, microbatches, "flash")
        found[one] = estimate(one, parse_slice(name), facts, 1.0).likely_seconds
        assert found[one] == pytest.approx(seconds, rel=0.3)
    # The compiled steps of each slice are in this order, too.
    assert list(found) == sorted(found, key=lambda one: (one.slice != "v6e-8", found[one]))
