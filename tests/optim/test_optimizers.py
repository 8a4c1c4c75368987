"""Optimizers and learning rates by name, against closed forms."""

import math

import keras
import numpy as np
import pytest

from tftpu.config import OPTIMIZERS, OptimizerConfig
from tftpu.errors import UserError
from tftpu.optim import optimizers, schedules
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.optim.metrics import Accuracy, BitsPerToken


@pytest.mark.medium
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_by_its_name_and_minimises(name):
    optimizer = optimizers.build(
        OptimizerConfig(name, learning_rate=0.05, decay="constant", weight_decay=0.01), 256, 100
    )
    variable = keras.Variable(np.full((4, 4), 2.0, np.float32), name="kernel")
    optimizer.build([variable])
    start = float(np.square(variable.numpy()).sum())
    for _ in range(30):
        optimizer.apply([variable.value * 2.0])
    assert float(np.square(variable.numpy()).sum()) < start
    again = type(optimizer).from_config(optimizer.get_config())
    assert type(again) is type(optimizer)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("lars",)])
def test_weight_decay_excludes_biases_and_norms(name):
    optimizer = optimizers.build(
        OptimizerConfig(name, learning_rate=0.5, decay="constant", weight_decay=0.1), 256, 100
    )
    with keras.name_scope("scale_of_a_layer"):  # which only sounds like a norm's
        kernel = keras.Variable(np.ones((2, 2), np.float32), name="kernel")
        others = [keras.Variable(np.ones(2, np.float32), name=n) for n in ("bias", "gamma", "beta")]
    optimizer.build([kernel, *others])
    optimizer.apply([np.zeros(v.shape, np.float32) for v in (kernel, *others)])
    assert (kernel.numpy() < 1.0).all()
    for variable in others:
        np.testing.assert_array_equal(variable.numpy(), 1.0)


def test_an_unknown_optimizer_fails_with_a_suggestion():
    with pytest.raises(UserError, match="Did you mean 'adam'"):
        optimizers.build(OptimizerConfig("adm"), 256, 100)


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", "Adam"), ("RMSprop", "RMSprop"), ("lamb", "Lamb")]
)
def test_a_name_alone_is_keras_optimizer_with_its_defaults(name, kind):
    ours, theirs = optimizers.build(name, 256, 100), getattr(keras.optimizers, kind)()
    assert type(ours) is type(theirs)
    assert ours.get_config().items() - {("name", ours.name)} <= theirs.get_config().items()


@pytest.mark.parametrize(
    ("scaling", "batch", "factor"), [("none", 1024, 1), ("linear", 1024, 4), ("sqrt", 1024, 2)]
)
def test_the_rate_is_scaled_with_the_batch(scaling, batch, factor):
    config = OptimizerConfig(learning_rate=0.1, scaling=scaling, base_batch_size=256)
    assert schedules.compute_peak_rate(config, batch) == pytest.approx(0.1 * factor)


def rates(steps, **options) -> list[float]:
    schedule = schedules.WarmupDecay(2.0, 100, **options)
    return [float(schedule(step)) for step in steps]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates([0, 5, 10], warmup_steps=10, decay="constant") == pytest.approx([0, 1, 2])


def test_decays_follow_their_formulas():
    steps = np.array([20, 50, 80, 100, 120])
    done = np.minimum((steps - 20) / 80, 1.0)
    shapes = {
        "cosine": (1 + np.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "polynomial": (1 - done) ** 3,
        "constant": np.ones(5),
    }
    for decay, shape in shapes.items():
        options = {"warmup_steps": 20, "decay": decay, "power": 3.0}
        np.testing.assert_allclose(rates(steps, **options), 2 * shape, atol=1e-6)
        if decay != "constant":
            ended = rates(steps, end_factor=0.1, **options)
            np.testing.assert_allclose(ended, 2 * (0.1 + 0.9 * shape), atol=1e-6)
    stepped = rates([29, 30, 59, 60], decay="step", boundaries=(30, 60), rate=0.1)
    assert stepped == pytest.approx([2, 0.2, 0.2, 0.02])


def test_smoothing_equals_keras_on_one_hot_labels():
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 5, 7), rng.normal(size=(7, 5)).astype(np.float32)
    for smoothing in (0.0, 0.1):
        theirs = keras.losses.CategoricalCrossentropy(True, smoothing, reduction=None)
        expected = theirs(np.eye(5)[labels], logits)
        actual = SmoothedCrossentropy(smoothing, reduction=None)(labels, logits)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        soft = rng.dirichlet(np.ones(5), 7).astype(np.float32)
        actual = SmoothedCrossentropy(smoothing, reduction=None)(soft, logits)
        np.testing.assert_allclose(actual, theirs(soft, logits), rtol=1e-5)


def test_accuracy_takes_class_ids_and_soft_labels():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(50, 4)), rng.integers(0, 4, 50)
    soft = 0.6 * np.eye(4)[labels] + 0.4 * np.eye(4)[rng.integers(0, 4, 50)]
    for given in (labels, np.eye(4)[labels], soft):
        metric = Accuracy()
        metric.update_state(given, logits)
        assert float(metric.result()) == pytest.approx((logits.argmax(1) == labels).mean())


def test_bits_are_nats_over_the_logarithm_of_two():
    metric = BitsPerToken()
    metric.update_state(np.array([0, 1]), np.zeros((2, 8), np.float32))
    assert float(metric.result()) == pytest.approx(3.0)


@pytest.mark.parametrize(("warmup", "steps", "warned"), [(50, 900, False), (50, 50, True)])
def test_a_run_shorter_than_its_warmup_is_warned_of(warmup, steps, warned, caplog):
    optimizers.build(OptimizerConfig("sgd", warmup_steps=warmup), 128, steps)
    assert ("before the end of its warmup of 50" in caplog.text) is warned
