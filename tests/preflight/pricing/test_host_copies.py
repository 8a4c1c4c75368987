"""Copies to the memory of the host and back: hidden behind work, or waited for."""

import pytest

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.pricing.cost import price
from tftpu.tpu.slices import parse_slice

ARRAY = "bf16[4096,4096]{1,0:T(8,128)(2,1)}"  # 32 MiB
HOST = "bf16[4096,4096]{1,0:T(8,128)(2,1)S(5)}"
STATS = dict.fromkeys(
    (
        *("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"),
        *("temp_size_in_bytes", "generated_code_size_in_bytes", "peak_memory_in_bytes"),
    ),
    0,
)


def _cost(cycles: int, slice_name: str = "v5e-1"):
    """Returns the cost of two copies, to the host and back, and of work between them."""
    text = f"""HloModule offload

ENTRY %main (x: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = {ARRAY} parameter(0)
  %copy-start = ({HOST}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%x)
  %copy-done = {HOST} copy-done(%copy-start)
  %copy-start.1 = ({ARRAY}, {HOST}, u32[]{{:S(2)}}) copy-start(%copy-done)
  %work = {ARRAY} negate(%x), backend_config={{"estimated_cycles":"{cycles}"}}
  %copy-done.1 = {ARRAY} copy-done(%copy-start.1)
  ROOT %sum = {ARRAY} add(%copy-done.1, %work), backend_config={{"estimated_cycles":"1000"}}
}}
"""
    step = LoweredStep(program=b"", arguments=["x"], precision="bfloat16")
    compiled = Compiled("", False, text, STATS, 0.0, 0.0, False)
    return price(step, compiled, parse_slice(slice_name))


def _waiting(cost) -> float:
    waits = [p for p in cost.instructions if p.kind == "host copy" and not p.overlaps]
    return sum(p.seconds for p in waits)


def test_a_copy_takes_its_bytes_over_the_link_to_the_host():
    for slice_name, rate in (("v5e-1", 16e9), ("v6e-1", 32e9), ("v3-8", 8e9)):
        assert _waiting(_cost(0, slice_name)) == pytest.approx(2 * 2**25 / rate, rel=0.1)


def test_work_beside_a_copy_hides_it():
    alone, beside = _cost(0), _cost(10**7)
    assert _waiting(beside) == pytest.approx(_waiting(alone) / 2, rel=0.1)
    assert beside.seconds < alone.seconds + 10**7 / 1.5e9


def test_what_lies_on_the_host_is_no_traffic_of_the_chips_memory():
    moved = {p.name: p.hbm_bytes for p in _cost(0).instructions}
    assert moved["copy-start"] == moved["copy-start.1"] == 2**25


def test_only_the_part_of_an_array_that_is_copied_counts():
    part = ARRAY.replace("[", "[1,")
    whole = HOST.replace("[", "[32,")
    text = f"""HloModule offload

ENTRY %main (x: bf16[32,4096,4096], i: s32[]) -> bf16[1,4096,4096] {{
  %x = {whole} parameter(0)
  %i = s32[] parameter(1)
  %start = (({whole}, s32[]), {part}, u32[]{{:S(2)}}) dynamic-slice-start(%x, %i)
  ROOT %done = {part} dynamic-slice-done(%start)
}}
"""
    step = LoweredStep(program=b"", arguments=["x", "i"], precision="bfloat16")
    compiled = Compiled("", False, text, STATS, 0.0, 0.0, False)
    cost = price(step, compiled, parse_slice("v5e-1"))
    assert _waiting(cost) == pytest.approx(2**25 / 16e9)
