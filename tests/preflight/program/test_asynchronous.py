"""Work that an `async-start` begins, in programs of libtpu 0.0.52 for v6e and tpu7x."""

import pytest

from tests.support.programs.collectives import compiled
from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.pricing.cost import Cost, price
from tftpu.preflight.program.asynchronous import count_asynchronous_bytes
from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.lifetimes import Lifetimes
from tftpu.tpu.slices import Slice, parse_slice

SLICE = parse_slice("v6e-8")
TABLE, ROWS = "f32[32000,1024]{1,0:T(8,128)}", "f32[4096,1024]{1,0:T(8,128)}"
SPARSE = 'async_execution_thread="sparsecore"'
CONTEXT = "(s32[16384]{0:T(1024)}, s32[25]{0:T(1)S(11)})"
ALIASES = "output_to_operand_aliasing={{2,0}: (0, {2,0}), {2,1}: (0, {2,1})}"
STARTED = f'{SPARSE}, calls=%begun, metadata={{op_name="head/x"}}'
CALLED = 'custom_call_target="x", called_computations={%runs}'
STATE = f"(({TABLE}, s32[4096]{{0:T(1024)}}), {ROWS}, {CONTEXT})"
WORK = 'add(%small, %small), backend_config={"estimated_cycles":"CYCLES"}'
# The rows of a table are gathered, or the parts of an array: the start has no operands.
SPARSE_CORE = f"""\
HloModule step, is_scheduled=true

%runs (t.0: {TABLE}, i.0: s32[4096]) -> {ROWS} {{
  %t.0 = {TABLE} parameter(0)
  %i.0 = s32[4096]{{0:T(1024)}} parameter(1)
  ROOT %it = OPERATION
}}

%begun (t.1: {TABLE}, i.1: s32[4096]) -> {ROWS} {{
  %t.1 = {TABLE} parameter(0)
  %i.1 = s32[4096]{{0:T(1024)}} parameter(1)
  ROOT %called = {ROWS} custom-call(%t.1, %i.1), {CALLED}
}}

ENTRY %main (t: {TABLE}, i: s32[4096], small: f32[8,8]) -> {ROWS} {{
  %t = {TABLE} parameter(0)
  %i = s32[4096]{{0:T(1024)}} parameter(1)
  %small = f32[8,8]{{1,0:T(8,128)}} parameter(2)
  %start = ((), (), {CONTEXT}) async-start(), {STARTED}
  %update = {STATE} async-update(%start, %t, %i), {ALIASES}
  %work = f32[8,8]{{1,0:T(8,128)}} {WORK}
  %done = {ROWS} async-done(%update)
  ROOT %out = {ROWS} negate(%done)
}}
"""
GATHER = f"{ROWS} gather(%t.0, %i.0), offset_dims={{1}}, slice_sizes={{1,1024}}"
ALL_GATHER = f"{TABLE} all-gather(%t.0), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}"


def priced(operation: str, cycles: int, target: Slice = SLICE) -> Cost:
    text = SPARSE_CORE.replace("OPERATION", operation).replace("CYCLES", str(cycles))
    step = LoweredStep(
        program=b"", arguments=["t", "i", "s"], layers={"head": "Embedding"}, precision="float32"
    )
    return price(step, compiled(text), target)


@pytest.mark.parametrize("cycles", [10**3, 10**6])
@pytest.mark.parametrize(
    ("name", "operation", "clock", "passed", "hops"),
    [
        ("v6e-8", ALL_GATHER, 1.75e9, 7 / 8, 6),  # 2 x 4 chips
        ("tpu7x-8", ALL_GATHER, 2.2e9, 3 / 4, 4),  # 2 x 2 chips of two devices
        ("tpu7x-8", ALL_GATHER.replace("all-gather", "reduce-scatter"), 2.2e9, 3 / 4, 4),
    ],
)
def test_a_collective_on_the_sparse_core_is_hidden_by_work_between_its_update_and_its_end(
    name, operation, clock, passed, hops, cycles
):
    cost = priced(operation, cycles, parse_slice(name))
    work = 0.5 * cycles / clock
    # The parts of 32000 rows pass two links of 100 GB/s, in hops of a microsecond.
    gathered = 32000 * 1024 * 4 * passed / 200e9 + hops * 1e-6
    assert cost.collective_seconds == pytest.approx(max(0.0, gathered - work), rel=1e-3, abs=1e-8)
    [update, done] = [i for i in cost.instructions if i.name in ("update", "done")]
    assert update.kind == done.kind == "collective" and update.seconds == 0.0


@pytest.mark.parametrize("cycles", [10**3, 10**6])
def test_a_gather_on_the_sparse_core_costs_its_rows_and_runs_beside_the_others(cycles):
    cost = priced(GATHER, cycles)
    [update, done] = [i for i in cost.instructions if i.name in ("update", "done")]
    indices, rows = 4 * 4096, 4 * 4096 * 1024
    assert update.hbm_bytes == indices + 2 * rows and done.hbm_bytes == 0
    alone = update.hbm_bytes / (0.8 * SLICE.generation.hbm_gbps * 1e9)
    assert done.seconds == pytest.approx(max(0.0, alone - 0.5 * cycles / 1.75e9), rel=1e-6)
    assert update.overlaps and update.kind == done.kind == "gather" and done.layer == "head"
    assert "start" not in {i.name for i in cost.instructions}


def test_the_result_of_a_gather_on_the_sparse_core_lives_from_the_update_on():
    lifetimes = Lifetimes(Module(SPARSE_CORE.replace("OPERATION", GATHER)))
    [rows] = [array for array in lifetimes.arrays if array.bytes == 4 * 4096 * 1024]
    names = [instruction.name for instruction in lifetimes.order]
    assert (names[rows.first], names[rows.last]) == ("update", "out")


def test_a_slice_that_is_fetched_asynchronously_costs_the_slice():
    text = """\
%sliced (a.0: s8[98304000]) -> s8[4194304] {
  %a.0 = s8[98304000]{0:T(1024)} parameter(0)
  ROOT %slice = s8[4194304]{0:T(1024)S(1)} slice(%a.0), slice={[0:4194304]}
}

ENTRY %main (a: s8[98304000]) -> s8[4194304] {
  %a = s8[98304000]{0:T(1024)} parameter(0)
  %s = ((s8[98304000]{0}), s8[4194304]{0:S(1)}, s32[]{:S(2)}) async-start(%a), calls=%sliced
  ROOT %d = s8[4194304]{0:S(1)} async-done(%s)
}
"""
    module = Module(text)
    moved = [
        count_asynchronous_bytes(module, module.entry[name], module.entry) for name in ("s", "d")
    ]
    assert moved == [4194304, 0]
