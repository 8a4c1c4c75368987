"""Models whose state alone is larger than a device: answered without the compiler."""

import keras
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow.lowering import lower
from tftpu.preflight import examine
from tftpu.preflight.options import PreflightOptions

WIDTH = 49_152
BATCH = (tf.TensorSpec((64, WIDTH)),) * 2


def model(optimizer: str = "adam") -> keras.Model:
    built = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    built.compile(optimizer, "mse")
    return built


@pytest.fixture
def uncompiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("The step was compiled.")

    monkeypatch.setattr(examine, "compile_program", refuse)


def test_what_a_device_holds_is_known_before_the_step_is_compiled():
    options = TrainConfig(ema_momentum=0.9)
    held = lower.lower(model, BATCH, 1, "float32", options).state_bytes
    weights = 4 * WIDTH**2
    assert (held.weights, held.averages) == (weights, weights)
    assert held.optimizer == pytest.approx(2 * weights, abs=100)  # and its counter and rate
    assert held.total == sum(held)


def test_a_state_that_does_not_fit_is_answered_with_what_would(uncompiled):
    [item] = preflight.check(model, BATCH, ["v5e-8"]).slices
    assert item.compiles and not item.fits
    assert item.hbm["weights"] == 4 * WIDTH**2 < item.hbm_limit_bytes < item.hbm_bytes
    said = preflight.Report(64, "mixed_bfloat16", None, [item]).text()
    assert "No batch fits: even the weights and the optimizer's state are too large." in said
    assert "weights 9 GiB, optimizer 18 GiB, so the step was not compiled" in said
    assert "An optimizer with less state would help" in said
    assert "cluster.mesh=fsdp:-1 divides it: 13.5 GiB with 2 devices along fsdp" in said
    assert "v4 has 30.8 GiB, v5p has 95.7 GiB, v6e has 31.2 GiB" in said and "v3 has" not in said


def test_an_optimizer_without_state_is_not_advised_twice(uncompiled):
    options = PreflightOptions(train=TrainConfig(ema_momentum=0.9))
    [item] = preflight.check(lambda: model("sgd"), BATCH, ["v3-8"], options).slices
    assert not any("optimizer with less state" in line for line in item.advice)
