"""FLOPs of kernels, counted in the code that Pallas makes of them for a TPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tftpu.preflight.program.hlo import Instruction, Module
from tftpu.preflight.program.kernels import count_kernel_flops

ROWS, DEPTH, COLUMNS, BLOCK = 512, 384, 256, 128


def _calls(function, *shapes: tuple[int, ...]) -> list[Instruction]:
    """Returns the calls of kernels in a function that is lowered for a TPU."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    bodies = re.findall(r"\\22body\\22: \\22([^\\]+)\\22", text)
    return [
        Instruction("call", "custom-call", [], [], "", f'backend_config={{"body":"{body}"}}')
        for body in bodies
    ]


def _multiply(loop):
    """Returns a matrix product in blocks, whose kernel runs `loop(steps, body)` over the depth."""

    def kernel(left, right, out):
        def body(step, total):
            part = pl.ds(step * BLOCK, BLOCK)
            return total + jnp.dot(left[:, part], right[part], preferred_element_type=jnp.float32)

        zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        out[...] = loop(DEPTH // BLOCK, body, zeros).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16),
        grid=(ROWS // BLOCK, COLUMNS // BLOCK),
        in_specs=[
            pl.BlockSpec((BLOCK, DEPTH), lambda i, j: (i, 0)),
            pl.BlockSpec((DEPTH, BLOCK), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
    )


def test_a_product_in_blocks_is_counted_over_its_grid_and_its_loop():
    def loop(steps, body, zeros):
        return jax.lax.fori_loop(0, steps, body, zeros)

    [call] = _calls(_multiply(loop), (ROWS, DEPTH), (DEPTH, COLUMNS))
    assert count_kernel_flops(call) == 2 * ROWS * DEPTH * COLUMNS


def test_a_loop_up_to_the_place_in_the_grid_is_not_guessed():
    def loop(steps, body, zeros):
        return jax.lax.fori_loop(0, jnp.minimum(pl.program_id(0), steps), body, zeros)

    [call] = _calls(_multiply(loop), (ROWS, DEPTH), (DEPTH, COLUMNS))
    assert count_kernel_flops(call) is None


def test_attention_by_another_library_is_its_closed_form_with_what_it_skips():
    batch, heads, time, width = 2, 4, 1024, 128
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((time, time))] * heads
    )
    attention = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    [call] = _calls(jax.vmap(attention), *[(batch, heads, time, width)] * 3)
    scores_and_values = 4 * batch * heads * time**2 * width
    assert count_kernel_flops(call) == scores_and_values


@pytest.mark.parametrize("rest", ["", 'backend_config={"body":"bm8gTUxJUg=="}'])
def test_code_that_cannot_be_read_is_no_work_of_zero(rest):
    assert count_kernel_flops(Instruction("call", "custom-call", [], [], "", rest)) is None


def test_attributes_with_lines_of_their_own_belong_to_their_instruction():
    text = """HloModule kernels

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %call = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", attributes={kernel={
"block": "128"
}}, backend_config={"cost_estimate":{"flops":"7"}}
}
"""
    call = Module(text).entry["call"]
    assert call.root and call.match_attribute(r'"flops":"(\d+)') == "7"
