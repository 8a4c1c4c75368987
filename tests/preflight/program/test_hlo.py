"""The HLO parser, against counts derived on paper."""

import numpy as np
import pytest

from tftpu.preflight.program.hlo import (
    Module,
    Tensor,
    count_hbm_bytes,
    count_product_flops,
    parse_tensors,
)
from tftpu.preflight.program.loops import Runs

LOOP = """\
HloModule step, is_scheduled=true

%body.1 (arg.1: (s32[], f32[128,256])) -> (s32[], f32[128,256]) {
  %arg.1 = (s32[], f32[128,256]) parameter(0)
  %index.1 = s32[] get-tuple-element(%arg.1), index=0
  %x.1 = f32[128,256]{1,0:T(8,128)} get-tuple-element(%arg.1), index=1
  %y.1 = f32[128,256]{1,0:T(8,128)} negate(%x.1), backend_config={"estimated_cycles":"100"}
  %by.1 = s32[] constant(STEP)
  %next.1 = s32[] add(%index.1, %by.1)
  ROOT %out.1 = (s32[], f32[128,256]) tuple(%next.1, %y.1)
}

%condition.1 (arg.2: (s32[], f32[128,256])) -> pred[] {
  %arg.2 = (s32[], f32[128,256]) parameter(0)
  %bound.2 = s32[] constant(8)
  %index.2 = s32[] get-tuple-element(%arg.2), index=0
  ROOT %less.2 = pred[] compare(%index.2, %bound.2), direction=LT
}

ENTRY %main.1 (p.0: f32[128,256]) -> f32[128,256] {
  %p.0 = f32[128,256]{1,0:T(8,128)} parameter(0)
  %start.0 = s32[] constant(START)
  %state.0 = (s32[], f32[128,256]) tuple(%start.0, %p.0)
  %while.0 = (s32[], f32[128,256]) while(%state.0), condition=%condition.1, body=%body.1KNOWN
  ROOT %result.0 = f32[128,256]{1,0:T(8,128)} get-tuple-element(%while.0), index=1
}
"""


@pytest.mark.parametrize(
    ("start", "step", "known", "times"),
    [
        ("0", "1", "", 8),
        ("3", "1", "", 5),
        ("0", "2", "", 4),
        ("3", "2", "", 3),  # 3, 5, 7
        # The compiler's own count wins.
        ("0", "1", ', backend_config={"known_trip_count":{"n":"6"}}', 6),
    ],
)
def test_an_instruction_in_a_loop_runs_once_per_iteration(start, step, known, times):
    module = Module(LOOP.replace("START", start).replace("STEP", step).replace("KNOWN", known))
    runs = {instruction.name: n for instruction, n, _ in Runs(module).iterate()}
    assert runs["y.1"] == times
    assert runs["p.0"] == 1


def test_what_the_compiler_adds_to_a_loop_belongs_to_the_op_that_it_was():
    said = ', metadata={op_name="head/Scatter"}'
    text = LOOP.replace("START", "0").replace("STEP", "1").replace("KNOWN", said)
    found = {
        i.name: i.op_name for body in Module(text).computations.values() for i in body.values()
    }
    assert found["y.1"] == "head/Scatter"
    assert found["p.0"] == ""


def test_tensors_are_padded_to_tiles():
    padded = parse_tensors("(f32[100,130]{1,0:T(8,128)}, bf16[100,130]{0,1:T(8,128)(2,1)}, s32[])")
    assert padded[0].padded_bytes == 104 * 256 * 4
    assert padded[1].padded_bytes == 128 * 136 * 2  # the first dimension is the minor one
    assert padded[2].padded_bytes == padded[2].bytes == 4
    assert padded[0].bytes == 100 * 130 * 4


def test_arrays_in_core_memory_are_distinguished_from_those_in_hbm():
    assert Tensor("f32", (8, 128), "1,0:T(8,128)S(1)").on_chip
    assert not Tensor("f32", (8, 128), "1,0:T(8,128)").on_chip


@pytest.mark.parametrize(
    ("stride", "dilate", "pad"), [(1, 1, (1, 1)), (2, 1, (0, 1)), (1, 2, (2, 2)), (2, 1, (3, 3))]
)
def test_flops_of_a_convolution_are_its_multiply_adds_without_padding(stride, dilate, pad):
    batch, size, inputs, outputs, kernel = 4, 11, 3, 5, 3
    span = (kernel - 1) * dilate + 1
    out = (size + sum(pad) - span) // stride + 1
    # Each output of a convolution of ones with ones is its number of products without padding.
    image = np.pad(np.ones(size), pad)
    line = sum(image[o * stride + k * dilate] for o in range(out) for k in range(kernel))
    module = Module(
        f"""\
ENTRY %main (a: f32[1]) -> f32[1] {{
  %a = f32[{batch},{size},{size},{inputs}]{{3,2,1,0}} parameter(0)
  %k = f32[{kernel},{kernel},{inputs},{outputs}]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[{batch},{out},{out},{outputs}]{{3,2,1,0}} convolution(%a, %k), \
window={{size={kernel}x{kernel} stride={stride}x{stride} pad={pad[0]}_{pad[1]}x{pad[0]}_{pad[1]} \
rhs_dilate={dilate}x{dilate}}}, dim_labels=b01f_01io->b01f
}}
"""
    )
    expected = 2 * line**2 * batch * inputs * outputs
    assert count_product_flops(module.entry["c"], module.entry) == expected


def test_flops_of_a_product_of_matrices():
    module = Module(
        """\
ENTRY %main (a: f32[1]) -> f32[1] {
  %a = bf16[4,32,64]{2,1,0} parameter(0)
  %b = bf16[4,64,16]{2,1,0} parameter(1)
  ROOT %d = bf16[4,32,16]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}
}
"""
    )
    assert count_product_flops(module.entry["d"], module.entry) == 2 * 4 * 32 * 64 * 16


# A loop's body as the compiler fuses it: two arrays of 200 steps get one more step each, and of a
# third one a fusion within the fusion reads one step.
IN_PLACE = """\
%one_step (p.1: bf16[200,8,128], p.2: s32[]) -> bf16[1,8,128] {
  %p.1 = bf16[200,8,128]{2,1,0} parameter(0)
  %p.2 = s32[] parameter(1)
  ROOT %step.1 = bf16[1,8,128]{2,1,0} dynamic-slice(%p.1, %p.2), dynamic_slice_sizes={1,8,128}
}

%fused (q.1: bf16[200,8,128], q.2: bf16[200,8,128], q.3: bf16[200,8,128], q.4: s32[]) -> () {
  %q.1 = bf16[200,8,128]{2,1,0} parameter(0)
  %q.2 = bf16[200,8,128]{2,1,0} parameter(1)
  %q.3 = bf16[200,8,128]{2,1,0} parameter(2)
  %q.4 = s32[] parameter(3)
  %new = bf16[1,8,128]{2,1,0} fusion(%q.3, %q.4), kind=kLoop, calls=%one_step
  %first = bf16[200,8,128]{2,1,0} dynamic-update-slice(%q.1, %new, %q.4)
  %second = bf16[200,8,128]{2,1,0} dynamic-update-slice(%q.2, %new, %q.4)
  %same = bf16[200,8,128]{2,1,0} bitcast(%second)
  ROOT %both = (bf16[200,8,128]{2,1,0}, bf16[200,8,128]{2,1,0}) tuple(%first, %same)
}

ENTRY %main (a: bf16[200,8,128], b: bf16[200,8,128], c: bf16[200,8,128], i: s32[]) -> () {
  %a = bf16[200,8,128]{2,1,0} parameter(0)
  %b = bf16[200,8,128]{2,1,0} parameter(1)
  %c = bf16[200,8,128]{2,1,0} parameter(2)
  %i = s32[]{S(6)} parameter(3)
  ROOT %f = (bf16[200,8,128]{2,1,0}, bf16[200,8,128]{2,1,0}) fusion(%a, %b, %c, %i), calls=%fused
}
"""


def test_several_arrays_that_a_fusion_updates_in_place_cost_one_step_each():
    module = Module(IN_PLACE)
    step = 8 * 128 * 2
    assert count_hbm_bytes(module, module.entry["f"], module.entry) == step + 2 * step


def test_an_array_that_a_fusion_also_reads_whole_costs_all_of_it():
    module = Module(IN_PLACE.replace("fusion(%q.3, %q.4)", "fusion(%q.1, %q.4)"))
    step = 8 * 128 * 2
    assert count_hbm_bytes(module, module.entry["f"], module.entry) == step + 2 * step + 200 * step
    copied = IN_PLACE.replace("bitcast(%second)", "add(%second, %q.2)")
    module = Module(copied)
    assert count_hbm_bytes(module, module.entry["f"], module.entry) == 2 * step + 2 * 200 * step


@pytest.mark.parametrize(
    ("other", "dtype"),
    [
        ("bf16[200,8,128]{2,1,0:T(8,128)} copy(%q.3)", "bf16"),
        ("bf16[200,1,8,128]{3,2,1,0} bitcast(%q.3)", "bf16"),
        ("f32[200,8,128]{2,1,0} convert(%q.3)", "f32"),
    ],
)
def test_a_slice_of_an_array_that_a_fusion_first_lays_out_anew_costs_one_step(other, dtype):
    text = IN_PLACE.replace("  %new =", f"  %other = {other}\n  %new =")
    text = text.replace("fusion(%q.3, %q.4)", "fusion(%other, %q.4)")
    text = text.replace("%p.1 = bf16", f"%p.1 = {dtype}").replace(
        "%step.1 = bf16", f"%step.1 = {dtype}"
    )
    module, step = Module(text), 8 * 128 * 2
    assert count_hbm_bytes(module, module.entry["f"], module.entry) == step + 2 * step


UPDATE = """\
ENTRY %main (a: bf16[4,64,256], b: bf16[4,64,1], i: s32[]) -> bf16[4,64,256] {
  %a = bf16[4,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,64,1]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %i = s32[]{S(6)} parameter(2)
  %part = bf16[4,64,1]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%a, %i), dynamic_slice_sizes={4,64,1}
  ROOT %u = bf16[4,64,256]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%a, %b, %i, %i, %i)
}
"""


def test_an_update_in_place_reads_and_writes_the_tiles_that_it_changes():
    """One column of 256: half of the tiles, which it changes in part."""
    module = Module(UPDATE)
    assert count_hbm_bytes(module, module.entry["u"], module.entry) == 2 * 4 * 64 * 128 * 2
    assert count_hbm_bytes(module, module.entry["part"], module.entry) == 4 * 64 * 2
    whole = Module(UPDATE.replace("bf16[4,64,1]", "bf16[1,64,256]"))
    assert count_hbm_bytes(whole, whole.entry["u"], whole.entry) == 64 * 256 * 2


def test_a_slice_that_is_fetched_ahead_reads_no_more_than_itself():
    text = """\
ENTRY %main (a: bf16[400,128]) -> bf16[100,128] {
  %a = bf16[400,128]{1,0:T(8,128)(2,1)} parameter(0)
  %s = ((bf16[400,128]{1,0:T(8,128)(2,1)}), bf16[100,128]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) \
slice-start(%a), slice={[0:100], [0:128]}
  ROOT %d = bf16[100,128]{1,0:T(8,128)(2,1)S(1)} slice-done(%s)
}
"""
    module = Module(text)
    assert count_hbm_bytes(module, module.entry["s"], module.entry) == 104 * 128 * 2


@pytest.mark.parametrize(("copy", "moved"), [("slice", 1), ("update-slice", 2)])
def test_a_dynamic_copy_that_runs_ahead_moves_the_part_alone(copy, moved):
    """The update lies in HBM and is read as well; the slice arrives in the core's own memory."""
    whole, part = "bf16[400,128]{1,0:T(8,128)(2,1)}", "bf16[96,128]{1,0:T(8,128)(2,1)}"
    shape = f"(({whole}, s32[]), {part[:-1]}S(1)}}, s32[])"
    if copy == "update-slice":
        shape = f"(({whole}, {part}, s32[]), {whole}, s32[])"
    module = Module(
        f"""\
ENTRY %main (a: bf16[400,128], i: s32[]) -> s32[] {{
  %a = {whole} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = {shape} dynamic-{copy}-start(%a, %i)
}}
"""
    )
    assert count_hbm_bytes(module, module.entry["s"], module.entry) == moved * 96 * 128 * 2


def test_a_fusion_with_a_tuple_as_its_result_writes_all_of_it():
    """The compiler writes the start of a collective so."""
    text = """HloModule start

%body (x: f32[8,128]) -> (f32[8,128], f32[16,128]) {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %call = (f32[8,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) custom-call(%x)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %f = (f32[8,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) fusion(%x), kind=kCustom, calls=%body
  ROOT %first = f32[8,128]{1,0:T(8,128)} get-tuple-element(%f), index=0
}
"""
    module = Module(text)
    assert count_hbm_bytes(module, module.entry["f"], module.entry) == 4 * 128 * (8 + 8 + 16)
