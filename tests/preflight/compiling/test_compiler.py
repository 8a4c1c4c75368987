"""Steps compiled by the real TPU compiler: verdicts, counts and prices, against closed forms.

Evidence: compiled. Nothing here ran on a TPU.
"""

import dataclasses
import functools
import json
import os
import re
import resource
import subprocess
import sys
import time

import keras
import psutil
import pytest
import tensorflow as tf

from tests.support.models import blocks
from tests.support.steps.lowering import lower
from tftpu import models, preflight
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow.lowering.lower import TensorFlowLowering
from tftpu.errors import UserError
from tftpu.models.sizes import GPT
from tftpu.preflight import PreflightOptions
from tftpu.preflight.compiling import compiler
from tftpu.preflight.compiling.caller import Caller
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.examining.changes import find_largest_batch, suggest_recomputing
from tftpu.preflight.examining.examiner import Examiner
from tftpu.tpu.slices import parse_slice

pytestmark = pytest.mark.compiles

layers = keras.layers


def compiled(model, optimizer=None):
    model.compile(
        optimizer=optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def classified(*shape):
    """Returns a batch spec: features of this shape, a class per example."""
    return tf.TensorSpec(shape), tf.TensorSpec(shape[:1], tf.int32)


def mlp(depth=2, width=1024, optimizer=None):
    def model_fn():
        hidden = [layers.Dense(width, activation="relu") for _ in range(depth)]
        return compiled(
            keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(128, name="head")]),
            optimizer() if optimizer else None,
        )

    return model_fn


def examine(model_fn, spec, slice_name="v3-8", **options):
    given = PreflightOptions(**{"precision": "auto", **options})
    return preflight.check(model_fn, spec, [slice_name], given).slices[0]


def accumulating(microbatches):
    return TrainConfig(gradient_accumulation_steps=microbatches)


class NoUpdate(keras.optimizers.Optimizer):
    """An optimizer that changes nothing, to show the cost of a step without one."""

    def update_step(self, gradient, variable, learning_rate):
        pass


def cpu_seconds():
    """Returns the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.exhaustive
def test_both_examples_on_two_slices_in_90_seconds_from_a_cold_cache(tmp_path):
    environment = {**os.environ, "TFTPU_CACHE": str(tmp_path / "cache")}
    start, busy = time.monotonic(), cpu_seconds()
    for config in ("digits_resnet", "python_gpt"):
        workdir = tmp_path / config
        command = [
            *(sys.executable, "-c", "from tftpu.launch.main import run; run()", "preflight"),
            *(f"--config={config}", "--slices=v3-8,v5e-8", f"--workdir={workdir}"),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "v3-8" in done.stdout and "v5e-8" in done.stdout
        found = json.loads((workdir / "preflight.json").read_text())["slices"]
        for item in found:
            assert item["compiles"] and item["fits"]
            assert 0 < item["roofline_ms"] < item["step_ms"]
            assert item["step_ms_low"] < item["step_ms"] < item["step_ms_high"]
            assert 0 < item["mfu"] < 1
            assert 0 < item["hbm_bytes"] < item["hbm_limit_bytes"]
            assert item["usd_per_1000_steps"] > 0
    # Elapsed time, or on a machine that others use as well, the CPU time, its upper limit.
    assert min(time.monotonic() - start, cpu_seconds() - busy) < 90


@pytest.mark.exhaustive
def test_a_loop_of_microbatches_costs_as_much_as_the_full_batch():
    def gpt():
        sizes = GPT("tiny", vocabulary=512, context=256, layers=1, width=256, heads=2)
        return compiled(models.build(sizes))

    # Only the loop adds up gradients, once per microbatch: 4 % of the step with 32 rows each, 12 %
    # with 8 rows.
    tokens = tf.TensorSpec((8 * 256, 256), tf.int32)
    whole = examine(gpt, (tokens, tokens))
    loop = examine(gpt, (tokens, tokens), train=accumulating(8))
    assert loop.flops == pytest.approx(whole.flops, rel=0.01)
    assert loop.model_flops == whole.model_flops
    assert loop.step_ms == pytest.approx(whole.step_ms, rel=0.10)
    assert loop.hbm_bytes < 0.5 * whole.hbm_bytes
    assert any(f"[{256 // 8}," in tensor.shape for tensor in loop.largest_tensors)  # in the loop


@pytest.mark.exhaustive
def test_eight_microbatches_of_a_real_model_cost_eight_steps():
    def resnet50():
        return compiled(models.build("resnet50"))

    def images(count):
        return tf.TensorSpec((count, 224, 224, 3), tf.bfloat16), tf.TensorSpec((count,), tf.int32)

    step = examine(resnet50, images(8 * 128))
    loop = examine(resnet50, images(8 * 8 * 128), train=accumulating(8))
    # The loop updates the weights once, a negligible part of this step.
    assert loop.step_ms == pytest.approx(8 * step.step_ms, rel=0.10)


@pytest.mark.slow
def test_doubling_the_depth_adds_the_flops_and_the_time_of_the_added_layers():
    width, batch = 1024, 1024
    spec = classified(8 * batch, width)
    small, large = examine(mlp(4), spec), examine(mlp(8), spec)
    # Forward, gradient of the input, gradient of the weights: a multiply and an add each.
    added = 4 * 3 * 2 * batch * width * width
    assert large.flops - small.flops == pytest.approx(added, rel=0.001)
    assert large.model_flops - small.model_flops == added
    first = 3 * 2 * batch * width * width  # its input needs no gradient, so the program saves 1/3
    assert small.model_flops - small.flops == pytest.approx(first / 3, rel=0.001)
    # The added layers run at most at the peak, and here at no less than a quarter of it.
    seconds = (large.step_ms - small.step_ms) / 1e3
    assert added / (123e12 / 2) < seconds < 4 * added / (123e12 / 2)
    assert large.step_ms == pytest.approx(2 * small.step_ms, rel=0.15)


@pytest.mark.exhaustive
def test_doubling_the_batch_doubles_flops_and_time():
    small = examine(mlp(), classified(8 * 4096, 1024))
    large = examine(mlp(), classified(8 * 8192, 1024))
    assert large.flops == 2 * small.flops
    # The all-reduce and the optimizer do not grow with the batch.
    assert 1.6 < large.step_ms / small.step_ms <= 2.05


@pytest.mark.slow
def test_removing_the_optimizer_saves_the_traffic_of_its_state():
    spec = classified(8 * 8, 4096)
    kept = examine(mlp(2, 4096), spec)
    removed = examine(mlp(2, 4096, lambda: NoUpdate(0.1)), spec)
    weights = 2 * 4096 * 4096  # the head's are 1.5 % more
    assert kept.flops == removed.flops
    # SGD with momentum reads the gradient, the weight and the momentum, and writes the last two.
    milliseconds = 5 * 4 * weights / (0.8 * 900e9 / 2) * 1e3
    (spent,) = [part.ms for part in kept.by_layer if part.name == "(optimizer)"]
    assert spent == pytest.approx(milliseconds, rel=0.05)
    assert kept.step_ms - removed.step_ms > 0.9 * milliseconds
    assert not any(part.ms > 0.01 for part in removed.by_layer if part.name == "(optimizer)")
    # Its state is gone from memory: the momentum of every weight.
    assert kept.hbm["arguments"] - removed.hbm["arguments"] == pytest.approx(4 * weights, rel=0.03)


def classifier(*body):
    return lambda: compiled(keras.Sequential([*(make() for make in body), layers.Dense(10)]))


edge_mlp = classifier(
    lambda: keras.Input((1024,)),
    lambda: layers.Dense(4096, activation="gelu"),
    lambda: layers.Dense(1024, activation="gelu"),
)
edge_cnn = classifier(
    lambda: keras.Input((64, 64, 3)),
    lambda: layers.Conv2D(64, 3, strides=2, activation="relu"),
    layers.GlobalAveragePooling2D,
)
edge_text = classifier(
    lambda: keras.Input((256,), dtype="int32"),
    lambda: layers.Embedding(4096, 256),
    lambda: layers.Dense(512, activation="relu"),
    layers.GlobalAveragePooling1D,
)
WORDS = tf.TensorSpec((8 * 24_576, 256), tf.int32), tf.TensorSpec((8 * 24_576,), tf.int32)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model_fn", "spec", "unit"),
    [
        pytest.param(edge_mlp, classified(8 * 384 * 1024, 1024), 16 * 1024, id="mlp"),
        pytest.param(edge_cnn, classified(8 * 96 * 1024, 64, 64, 3), 4096, id="cnn"),
        pytest.param(edge_text, WORDS, 1024, id="text"),
    ],
)
def test_the_largest_batch_that_it_names_compiles_and_the_next_does_not(model_fn, spec, unit):
    verdict = examine(model_fn, spec, "v2-8", batch_unit=unit)
    assert verdict.compiles and not verdict.fits
    assert verdict.hbm_bytes > verdict.hbm_limit_bytes
    if any(" makes " in text for text in verdict.advice):
        assert any("accumulation_steps" in text for text in verdict.advice)
        assert verdict.largest_per_core_batch is None
    options = PreflightOptions(batch_unit=unit)
    examiner = Examiner(
        *(model_fn, spec, options, TensorFlowLowering()), *(Caller(), Processes(Progress()))
    )
    sizes = verdict.per_core_batch, verdict.hbm_bytes, verdict.hbm_limit_bytes
    edge, beyond = find_largest_batch(examiner, parse_slice("v2-8"), *sizes)
    assert beyond - edge == unit

    def at(batch):
        sized = [tf.TensorSpec((8 * batch, *part.shape[1:]), part.dtype) for part in spec]
        return examine(model_fn, tuple(sized), "v2-8", batch_unit=unit)

    fits = at(edge)
    assert fits.fits and fits.hbm_bytes <= fits.hbm_limit_bytes
    assert fits.hbm_bytes > 0.7 * fits.hbm_limit_bytes  # near the edge
    assert "RESOURCE_EXHAUSTED" in at(beyond).error


@pytest.mark.exhaustive  # slow tests compile models of tests/compatibility
def test_a_users_own_model_gets_a_report():
    def mobile_net():
        model = keras.applications.MobileNetV3Small(
            input_shape=(96, 96, 3), weights=None, classes=100, classifier_activation=None
        )
        return compiled(model)

    report = preflight.check(mobile_net, classified(8 * 32, 96, 96, 3), ["v5e-8"])
    item = report.slices[0]
    assert item.fits and item.step_ms > 0
    # 12 M multiply-adds at 96 pixels (56.5 M at 224, the paper's figure, less the head).
    assert item.model_flops / 32 == pytest.approx(6 * 56.5e6 * (96 / 224) ** 2, rel=0.15)
    shares = sum(spent.step_share for spent in item.by_layer)
    named = sum(s.step_share for s in item.by_layer if not s.name.startswith("("))
    assert shares == pytest.approx(1, abs=0.05) and named > 0.6
    assert "v5e-8" in report.text(explain=True)


def with_layer(layer):
    def model_fn():
        body = [layer(), layers.Flatten(name="flat"), layers.Dense(10, name="head")]
        return compiled(keras.Sequential([keras.Input((32, 32, 3)), *body]))

    return model_fn


def test_a_layer_that_no_tpu_can_run_is_named_with_its_op():
    model_fn = with_layer(lambda: layers.RandomRotation(0.1, name="augment"))
    with pytest.raises(UserError, match=r"'augment' uses the op ImageProj.*engine=jax"):
        preflight.check(model_fn, classified(64, 32, 32, 3), ["v3-8"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "slice_name", [pytest.param("v3-8", marks=pytest.mark.exhaustive), "v5e-8"]
)
def test_random_numbers_are_priced_as_the_tpu_draws_them(slice_name):
    """The arithmetic of a CPU's generator would take twelve times the rest of the step on v5e."""

    def cycles(rate):
        def model_fn():
            body = [layers.Dense(4096), layers.Dropout(rate), layers.Dense(10)]
            return compiled(keras.Sequential([keras.Input((512,)), *body]))

        return examine(model_fn, classified(8 * 4096, 512), slice_name).estimated_cycles

    assert cycles(0.0) < cycles(0.1) < 1.6 * cycles(0.0)


@pytest.mark.slow
def test_a_layer_that_augments_in_the_step_is_named():
    # Unlike most random layers, RandomFlip compiles: it is a waste, not an error.
    model_fn = with_layer(lambda: layers.RandomFlip(name="augment"))
    item = examine(model_fn, classified(64, 32, 32, 3))
    assert any("'augment'" in text and "RandomFlip" in text for text in item.lints)
    assert any("input pipeline" in text for text in item.lints)


@pytest.mark.slow
def test_lints_name_the_layer_and_the_fix():
    def model_fn():
        body = [
            layers.Conv2D(8, 3, groups=4, name="grouped"),
            layers.Flatten(name="flat"),
            layers.Dense(136, name="odd"),
            layers.Dense(32_768, dtype="float32", name="exact"),
        ]
        return compiled(keras.Sequential([keras.Input((32, 32, 4)), *body]))

    item = examine(model_fn, classified(8 * 12, 32, 32, 4))
    found = "\n".join(item.lints)
    assert "12 examples does not fill tiles of 8" in found
    assert "'grouped'" in found and "nested XLA function" in found
    assert "'odd'" in found and "136 features" in found and "256" in found
    assert "'exact'" in found and "float32 under a bfloat16 policy" in found


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_fails_only_on_that_slice():
    report = preflight.check(mlp(), classified(8, 1024), ["v3-8", "v3-32"])
    small, large = report.slices
    assert small.fits
    assert not large.compiles and "cannot be divided among 32" in large.error
    assert "does not compile" in report.text()


def test_a_dynamic_shape_and_an_unknown_slice_fail_before_compiling():
    spec = tf.TensorSpec((None, 1024)), tf.TensorSpec((None,), tf.int32)
    with pytest.raises(UserError, match="only static shapes"):
        preflight.check(mlp(), spec, ["v3-8"])
    with pytest.raises(UserError, match="Did you mean 'v5p-8'"):
        preflight.check(mlp(), classified(8, 1024), ["v5-8"])


@pytest.mark.slow
def test_a_crash_of_the_compiler_is_reported_and_not_cached(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path))
    good = sys.executable
    script = tmp_path / "crashes"
    script.write_text("#!/bin/sh\necho 'F0000 check failed' >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    item = examine(mlp(1, 128), classified(64, 128))
    assert item.undecided and not item.compiles
    assert "SIGABRT" in item.error and "check failed" in item.error
    assert "check failed" not in capfd.readouterr().err  # messages of libtpu are hidden
    examine(mlp(1, 128), classified(64, 128), verbose=True)
    assert "check failed" in capfd.readouterr().err
    monkeypatch.setattr(sys, "executable", good)
    assert examine(mlp(1, 128), classified(64, 128)).fits


@pytest.mark.medium
def test_a_compiler_that_takes_too_long_is_stopped(monkeypatch, tmp_path):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path))
    item = examine(mlp(1, 128), classified(64, 128), time_limit=0.2)
    assert item.undecided and "had not finished after 0" in item.error
    assert 0.2 <= item.compile_seconds < 20


@pytest.mark.slow
def test_a_compiled_program_is_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path))
    first = examine(mlp(1, 128), classified(64, 128))
    monkeypatch.setattr(Processes, "run", None)  # the second check must not compile
    assert examine(mlp(1, 128), classified(64, 128)) == first


@pytest.mark.slow
def test_a_damaged_program_in_the_cache_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path))
    first = examine(mlp(1, 128), classified(64, 128))
    for name in ("result.json", "program.txt.gz"):
        [file] = tmp_path.glob(f"preflight/*/{name}")
        file.write_bytes(file.read_bytes()[:20])
        again = examine(mlp(1, 128), classified(64, 128))
        assert dataclasses.replace(again, compile_seconds=first.compile_seconds) == first


@pytest.mark.medium
def test_a_step_that_is_traced_again_is_the_same_program():
    specs = classified(8, 16)
    steps = (lower(mlp(1, 16), specs, 8, "float32", accumulating(2)) for _ in range(2))
    first, second = map(compiler._convert_step, steps)  # each has a loop, a function of TensorFlow
    assert b"while_body" in first and first == second


def test_another_version_of_libtpu_compiles_again(monkeypatch):
    target = parse_slice("v3-8")
    before = compiler._build_key(b"module", target, {})
    monkeypatch.setattr(compiler, "read_libtpu_version", lambda: "9.9.9")
    now = compiler._build_key(b"module", target, {})
    others = (
        compiler._build_key(b"module", parse_slice("v5e-8"), {}),
        compiler._build_key(b"module", target, {"xla_a": "1"}),
    )
    assert len({before, now, *others}) == 4


def test_other_options_of_libtpu_in_the_environment_compile_again(monkeypatch):
    target, keys = parse_slice("v3-8"), []
    for given in ("", "--xla_tpu_scoped_vmem_limit_kib=1024"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        keys.append(compiler._build_key(b"module", target, {}))
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert keys[0] != keys[1]
    assert compiler._build_key(b"module", target, {}) == keys[0]


@pytest.mark.exhaustive
def test_a_batch_that_does_not_fit_may_fit_with_recomputed_blocks():
    sizes = {"vocabulary": 256, "context": 128, "layers": 3, "width": 128, "heads": 4}

    def model(remat):
        return compiled(models.build(GPT(name="gpt", remat=remat, **sizes)))

    spec = tuple(tf.TensorSpec((8 * 8192, 128), tf.int32) for _ in range(2))
    options = PreflightOptions(precision="mixed_bfloat16", recomputing=model)
    examiner = Examiner(
        *(functools.partial(model, "none"), spec, options, TensorFlowLowering()),
        *(Caller(), Processes(Progress())),
    )
    target = parse_slice("v2-8")
    assert examiner.compile(examiner.lower(8, 8192), target).out_of_memory
    helps, (said,) = suggest_recomputing(examiner, target, 8192)
    fits = r"--config\.model\.remat=block makes this batch fit: .* GiB, .* ms per step, .*\."
    assert helps and re.fullmatch(fits, said)


@pytest.mark.exhaustive
def test_blocks_of_any_model_are_advised_to_be_recomputed():
    def chain():
        model = blocks.build_chain()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    examples, target = 1 << 17, parse_slice("v2-8")
    x = tf.TensorSpec((8 * examples, blocks.TIME, blocks.WIDTH))
    spec = x, tf.TensorSpec((8 * examples,), tf.int32)

    def advise(remat):
        options = PreflightOptions(train=TrainConfig(remat=remat), precision="float32")
        lowering, processes = TensorFlowLowering(), Processes(Progress())
        examiner = Examiner(chain, spec, options, lowering, Caller(), processes)
        return suggest_recomputing(examiner, target, examples)

    helps, (said,) = advise("none")
    assert helps
    assert re.fullmatch(
        r"--config\.train\.remat=block makes this batch fit: .*, the same update\.", said
    )
    assert advise("block") == (None, [])


@pytest.mark.exhaustive
def test_what_a_conversion_needed_is_free_for_the_compiler():
    def deep():
        layers = [keras.layers.Dense(16, "gelu") for _ in range(60)]
        model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    step = lower(deep, (tf.TensorSpec((8, 16)), tf.TensorSpec((8,), tf.int32)), 8, "float32")
    compiler.check_machine()  # imports jax
    process = psutil.Process()
    before = process.memory_info().rss
    module = compiler._convert_step(step)
    assert len(module) > 10**6
    assert process.memory_info().rss - before < 80 * 2**20  # 160 MiB were kept
