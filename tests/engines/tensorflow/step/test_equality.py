"""One device or eight, one microbatch or four: the same numbers as plain TensorFlow."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, random_batches, relative
from tests.support.steps import reference, stepping
from tests.support.steps.step_cases import OPTIONS, PRODUCT, covering_set, optimizer_named

STEPS, BATCH = 5, 64
TOLERANCE = 1e-5


@functools.cache
def expected(optimizer: str, global_clipnorm: float | None, weighted: bool) -> dict:
    def forward(weights, x):
        return tf.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]

    weights = mlp().get_weights()
    batches = random_batches(STEPS, BATCH, weighted)
    return reference.Reference(forward, weights, optimizer, global_clipnorm).run(batches)


def check(count, gradient_accumulation_steps, optimizer, global_clipnorm, weighted, ema_momentum):
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(optimizer_named(optimizer), loss, weighted_metrics=["accuracy"])
    batches = random_batches(STEPS, BATCH, weighted)
    options = {
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "global_clipnorm": global_clipnorm,
        "ema_momentum": ema_momentum,
    }
    step = stepping.make_step(engine, model, batches, **options)
    results = stepping.train(engine, step, batches)
    right = expected(optimizer, global_clipnorm, weighted)
    np.testing.assert_allclose([r["loss"] for r in results], right["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose(
        [r["accuracy"] for r in results], right["accuracies"], rtol=TOLERANCE
    )
    for actual, wanted in zip(model.get_weights(), right["weights"]):
        assert relative(actual, wanted) < TOLERANCE
    averages = [average.numpy() for average in step.state.averages]
    assert len(averages) == (0 if ema_momentum is None else len(right["ema"]))
    for actual, wanted in zip(averages, right["ema"]):
        assert relative(actual, wanted) < TOLERANCE


@pytest.mark.medium
@pytest.mark.parametrize("case", covering_set(), ids=str)
def test_equals_one_device(case):
    check(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_equals_one_device_in_every_combination(case):
    check(*case)


def test_the_covering_set_covers():
    chosen = covering_set()
    assert len(chosen) < 30
    for first, second in itertools.combinations(range(len(OPTIONS)), 2):
        met = {(case[first], case[second]) for case in chosen}
        names = list(OPTIONS)
        assert met == set(itertools.product(OPTIONS[names[first]], OPTIONS[names[second]]))


def test_clipping_takes_effect():
    free, clipped = (expected("sgd", clip, False) for clip in OPTIONS["global_clipnorm"])
    assert relative(clipped["weights"][0], free["weights"][0]) > 0.01
