"""The HLO parser, against counts derived on paper."""

import numpy as np
import pytest

from tftpu.preflight.hlo import Module, Tensor, product_flops, tensors
from tftpu.preflight.loops import Runs

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
    runs = {instruction.name: n for instruction, n, _ in Runs(module).walk()}
    assert runs["y.1"] == times
    assert runs["p.0"] == 1


def test_tensors_are_padded_to_tiles():
    padded = tensors("(f32[100,130]{1,0:T(8,128)}, bf16[100,130]{0,1:T(8,128)(2,1)}, s32[])")
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
    assert product_flops(module.entry["c"], module.entry) == expected


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
    assert product_flops(module.entry["d"], module.entry) == 2 * 4 * 32 * 64 * 16
