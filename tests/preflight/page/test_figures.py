"""Numbers that a page draws, against figures on paper and against the compiler's own."""

import keras
import pytest
import tensorflow as tf

from tests.support.programs.collectives import ESTIMATED, FUSIONS, GATHER, PAIR, SLICE, compiled
from tftpu import preflight
from tftpu.config import TrainConfig
from tftpu.engines.lowered import LoweredStep, StateBytes
from tftpu.preflight import PreflightOptions
from tftpu.preflight.plots import MAX_PLACES, build_plots
from tftpu.preflight.pricing.cost import price

STATE_BYTES = StateBytes(weights=10, optimizer=20, averages=0)
STEP = LoweredStep(program=b"", arguments=["a", "b"], precision="float32", state_bytes=STATE_BYTES)
MIB = 2**20


def drawn(text):
    program = compiled(text)
    return build_plots(STEP, program, price(STEP, program, SLICE), SLICE)


def test_a_long_program_is_drawn_with_few_points_and_its_peak():
    lines = ["  %p.0 = f32[256,1024]{1,0:T(8,128)} parameter(0)"]
    for n in range(1000):  # a chain of arrays of 1 MiB, and at one place two of 4 MiB
        size = 1024 if n == 777 else 256
        lines.append(f"  %x.{n + 1} = f32[{size},1024]{{1,0:T(8,128)}} negate(%x.{n})")
    text = "\n".join(lines).replace("%x.0)", "%p.0)") + "\n  ROOT %r = f32[] negate(%x.1000)\n}\n"
    curve = drawn(f"HloModule step\n\nENTRY %main (p: f32[]) -> f32[] {{\n{text}").memory
    assert curve.instructions == 1001 and len(curve.bytes) == len(curve.layers) == MAX_PLACES
    assert max(curve.bytes) == 5 * MIB  # what is read, and what is written
    assert sorted(curve.bytes)[MAX_PLACES // 2] == 2 * MIB
    assert curve.peak == 777 * MAX_PLACES // 1001
    assert [a.bytes for a in curve.arrays] == [4 * MIB, 1 * MIB]
    assert curve.held == {"weights": 10, "optimizer": 20}


@pytest.mark.parametrize("program", [PAIR, FUSIONS], ids=["pair", "fusions"])
@pytest.mark.parametrize("cycles", [10**3, 6 * 10**5])
def test_work_hides_the_part_of_an_exchange_that_nothing_waits_for(program, cycles):
    text = program.replace("CYCLES", str(cycles))
    [exchange] = drawn(text).exchanges
    work = 0.5 * cycles / 1.5e9
    assert exchange.opcode == "all-gather" and exchange.count == 1
    assert exchange.sent_bytes == 8 * 2**20 * 4 * 7 / 8
    assert exchange.ms == pytest.approx(1e3 * GATHER, rel=0.01)
    waits = max(0.0, GATHER - work)
    assert exchange.waited_ms == pytest.approx(1e3 * waits, rel=0.02, abs=1e-5)


def test_only_instructions_with_products_are_points_of_the_roofline():
    text = f"""\
HloModule step

ENTRY %main (p.0: f32[1024,1024]) -> f32[1024,1024] {{
  %p.0 = f32[1024,1024]{{1,0}} parameter(0)
  %dot = f32[1024,1024]{{1,0}} dot(%p.0, %p.0), lhs_contracting_dims={{1}}
  ROOT %sum = f32[1024,1024]{{1,0}} add(%dot, %p.0), {ESTIMATED.replace("CYCLES", "5")}
}}
"""
    [point] = drawn(text).points
    assert (point.name, point.flops, point.hbm_bytes) == ("dot", 2 * 1024**3, 3 * 4 * MIB)
    assert point.ms == pytest.approx(1e3 * 2 * 1024**3 / 197e12 / 0.5)


def perceptron():
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(128, name="head")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("microbatches", [1, 4], ids=["whole", "loop"])
def test_the_peak_of_a_compiled_program_is_the_compilers_own(microbatches):
    count = 8 * 4096 * microbatches
    spec = tf.TensorSpec((count, 1024)), tf.TensorSpec((count,), tf.int32)
    train = TrainConfig(gradient_accumulation_steps=microbatches)
    [item] = preflight.check(perceptron, spec, ["v3-8"], PreflightOptions(train=train)).slices
    curve = item.plots.memory
    assert item.hbm["temporaries"] > 40 * MIB
    assert max(curve.bytes) - curve.base == pytest.approx(item.hbm["temporaries"], rel=0.01)
    assert max(curve.bytes) == pytest.approx(item.hbm_bytes, rel=0.01)
    # The activations of a layer: bfloat16, of a microbatch.
    activations = 4096 * 1024 * 2
    assert any(array.bytes >= activations for array in curve.arrays)
    assert [loop.times for loop in curve.loops if loop.last > loop.first] == (
        [4] if microbatches > 1 else []
    )
    waited = sum(exchange.waited_ms for exchange in item.plots.exchanges)
    assert waited == pytest.approx(item.collective_ms)
    assert {point.kind for point in item.plots.points} == {"matrix"}
    assert sum(point.flops for point in item.plots.points) == item.flops
