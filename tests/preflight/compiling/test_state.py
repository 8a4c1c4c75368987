"""Models whose state alone is larger than a device: answered without the compiler."""

import time

import keras
import pytest
import tensorflow as tf

from tests.support.steps.lowering import lower
from tftpu import preflight
from tftpu.config import TrainConfig
from tftpu.engines.lowered import StateBytes
from tftpu.engines.tensorflow.lowering.lower import TensorFlowBuiltStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.examining import examiner
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.slice_report import SliceReport, suggest_for_state
from tftpu.tpu.slices import parse_slice

WIDTH = 49_152
BATCH = (tf.TensorSpec((64, WIDTH)),) * 2


def model(optimizer: str = "adam") -> keras.Model:
    built = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    built.compile(optimizer, "mse")
    return built


@pytest.fixture
def uncompiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("The step was lowered or compiled.")

    monkeypatch.setattr(TensorFlowBuiltStep, "lower", refuse)
    monkeypatch.setattr(examiner, "compile_program", refuse)


def test_what_a_device_holds_is_known_before_the_step_is_compiled():
    options = TrainConfig(ema_momentum=0.9)
    held = lower(model, BATCH, 1, "float32", options).state_bytes
    weights = 4 * WIDTH**2
    assert (held.weights, held.averages) == (weights, weights)
    assert held.optimizer == pytest.approx(2 * weights, abs=100)  # and its counter and rate
    assert held.total == sum(held)


def test_a_state_that_does_not_fit_is_answered_with_what_would(uncompiled):
    [item] = preflight.check(model, BATCH, ["v5e-8"]).slices
    assert item.compiles and not item.fits
    assert item.hbm["weights"] == 4 * WIDTH**2 < item.hbm_limit_bytes < item.hbm_bytes
    said = preflight.Report(64, "mixed_bfloat16", None, [item]).text()
    assert "alone need 27 GiB on each device, which has 15.8 GiB" in said
    assert (
        "(weights 9 GiB, optimizer 18 GiB). This is arithmetic: the step was not compiled" in said
    )
    assert "Compiled with the TPU compiler" not in said
    assert "An optimizer with less state would help" in said
    assert "--config.cluster.mesh=fsdp:-1 divides it: 3.38 GiB per device" in said
    assert (
        "LoRA (--config.model.lora=16) needs hardly any" in said
        and "the weights take 9 GiB" in said
    )
    assert "More chips" not in said  # since these eight are enough
    assert "v4 has 30.8 GiB, v5p has 95.7 GiB, v6e has 31.2 GiB." in said and "v3 has" not in said


def test_a_generation_for_jax_alone_is_named_only_to_the_jax_engine():
    target, held = parse_slice("v5e-8"), StateBytes(2**33, 2**34, 0)
    limit = target.generation.hbm_limit
    for mesh, named in (("", False), ("data:8", True)):
        report = SliceReport("v5e-8", 8, hbm_limit_bytes=limit, mesh=mesh)
        said = " ".join(suggest_for_state(report, held, target))
        assert "v5p has 95.7 GiB" in said and ("tpu7x has 94.7 GiB" in said) == named


@pytest.mark.parametrize(("gib", "needed", "share"), [(9, "v5e-4", 6.75), (18, "v5e-4", 13.5)])
def test_a_state_that_no_mesh_of_the_slice_holds_needs_more_chips(gib, needed, share):
    target = parse_slice("v5e-1")
    held = StateBytes(gib * 2**30, 2 * gib * 2**30, 0)
    report = SliceReport("v5e-1", 1, hbm_limit_bytes=target.generation.hbm_limit)
    said = " ".join(suggest_for_state(report, held, target))
    assert (
        f"{needed} with --config.cluster.engine=jax --config.cluster.mesh=fsdp:-1 takes {share} GiB"
        in said
    )


@pytest.mark.medium
def test_the_estimate_comes_before_the_compiler_and_names_what_cannot_fit(monkeypatch, capfd):
    said = []

    def refuse(*_, **__):
        time.sleep(1.0)
        said.append(capfd.readouterr().err)
        return Compiled("no compiler", False, "", {}, 0.0, 1.0, False)

    monkeypatch.setattr(examiner, "compile_program", refuse)
    preflight.check(model, BATCH, ["v5e-1", "v5e-8", "v5p-16"])
    assert said[0].startswith("Estimate before compiling, by arithmetic: weights and optimizer's")
    refused = "27 GiB of 15.8 GiB: does not fit"
    divided = "with --config.cluster.mesh=fsdp:-1: 3.38 GiB"
    # 64 examples by 8 devices, 6 FLOPs for each of the weights, at 459 TFLOP/s; 8 chips of $4.20.
    step = "at the peak 253 us per step, 0.236 cents per 1,000"
    lines = (
        f"  v5e-1: {refused}\n  v5e-8: {refused}; {divided}\n  v5p-16: 27 GiB of 95.7 GiB; {step}\n"
    )
    assert lines in said[0]
    assert "usually takes five to fifteen minutes per slice" in said[0]


def specs(*shapes, dtype=tf.int32):
    return [tf.TensorSpec(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (specs((4, 8), (4, 8)), 32),
        (({"ids": specs((4, 8))[0], "mask": specs((4, 8))[0]}, *specs((4, 8), (4, 8))), 32),
        (specs((4, 8), (4,)), None),  # a class for each text
        ((specs((4, 8, 8, 3))[0], specs((4, 8, 8))[0]), None),  # a class for each pixel
        (specs((4, 8), (4, 8), dtype=tf.float32), None),
        (specs((4, 8)), None),
        ({"noise": specs((4, 8))[0], "ids": specs((4, 8))[0]}, None),
    ],
    ids=["tokens", "nested", "texts", "pixels", "numbers", "no labels", "own"],
)
def test_only_labels_of_tokens_are_counted(batch, tokens):
    assert examiner.count_tokens(batch) == tokens


def test_an_optimizer_without_state_is_not_advised_twice(uncompiled):
    options = PreflightOptions(train=TrainConfig(ema_momentum=0.9))
    [item] = preflight.check(lambda: model("sgd"), BATCH, ["v3-8"], options).slices
    assert not any("optimizer with less state" in line for line in item.advice)
