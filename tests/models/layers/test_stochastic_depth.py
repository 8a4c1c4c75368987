"""Stochastic depth drops the same examples on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import Negative
from tests.support.steps import stepping
from tftpu.engines import keras_internals
from tftpu.models.layers.stochastic_depth import ExampleSeed, StochasticDepth

BATCH, FEATURES, RATE = 64, 3, 0.3


def kept(count: int, gradient_accumulation_steps: int, steps: int = 1, seed: int = 0) -> np.ndarray:
    """Returns which examples two layers kept in each step: (steps, layers, examples), bool.

    Example i is the i-th unit vector, so only the i-th row of a kernel learns from it: by 1 / keep
    in each feature, or not at all.
    """
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        x = inputs = keras.Input((BATCH,))
        zeros = {"use_bias": False, "kernel_initializer": "zeros"}
        dense = [keras.layers.Dense(FEATURES, **zeros) for _ in range(2)]
        branches = [StochasticDepth(RATE, seed=9)(layer(x)) for layer in dense]
        model = keras.Model(inputs, keras.layers.Add()(branches))
        model.compile(keras.optimizers.SGD(1.0), Negative(reduction="sum"))
    batches = [(np.eye(BATCH, dtype=np.float32), np.zeros(BATCH, np.int64), None)]
    step = stepping.make_step(
        engine, model, batches, gradient_accumulation_steps=gradient_accumulation_steps, seed=seed
    )
    found = []
    for _ in range(steps):
        before = [layer.kernel.numpy() for layer in dense]
        stepping.train(engine, step, batches)
        moved = np.stack([layer.kernel.numpy() - b for layer, b in zip(dense, before)])
        assert ((moved == 0) | np.isclose(moved, 1 / (1 - RATE))).all()
        assert (moved == moved[..., :1]).all()  # all of an example, or nothing
        found.append(moved[..., 0] > 0)
    return np.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [pytest.param((8, 1), marks=pytest.mark.slow), (1, 4), (4, 4)], ids=str
)
def test_an_example_draws_the_same_however_the_batch_is_shared(parts):
    np.testing.assert_array_equal(kept(*parts, steps=2), kept(1, 1, steps=2))


@pytest.mark.slow
def test_steps_layers_and_seeds_draw_independently():
    found = np.concatenate([kept(1, 1, steps=6), kept(1, 1, steps=6, seed=1)]).reshape(-1, BATCH)
    assert len({row.tobytes() for row in found}) == len(found)
    error = np.sqrt(RATE * (1 - RATE) / found.size)
    assert abs(found.mean() - (1 - RATE)) < 3 * error
    agree = np.mean(found[:-2] == found[2:])  # by chance: both kept, or both dropped
    assert abs(agree - (RATE**2 + (1 - RATE) ** 2)) < 0.05


@pytest.mark.slow
def test_the_numbers_are_uniform_and_unrelated():
    draws = np.stack([ExampleSeed(seed).draw_uniform(500).numpy() for seed in range(500)])
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(1 / 12 / draws.size)
    counts = np.histogram(draws, 100, (0, 1))[0]
    chi_square = ((counts - draws.size / 100) ** 2 / (draws.size / 100)).sum()
    assert chi_square < 99 + 4 * np.sqrt(2 * 99)
    # Between neighbouring examples, and neighbouring seeds.
    for first, second in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(first.size)


def test_xla_draws_the_same_numbers_as_eager_execution():
    eager = ExampleSeed(7).draw_uniform(100)
    generator = ExampleSeed(7)
    compiled = tf.function(lambda: generator.draw_uniform(100), jit_compile=True)
    np.testing.assert_array_equal(compiled(), eager)


def test_evaluation_changes_nothing_and_training_keeps_the_mean():
    layer = StochasticDepth(RATE, seed=1)
    x = np.ones((20000, 2), np.float32)
    np.testing.assert_array_equal(layer(x, training=False), x)
    assert layer(x, training=True).numpy().mean() == pytest.approx(1.0, abs=0.015)
    first, second = (layer(x, training=True).numpy() for _ in range(2))
    assert (first != second).any()  # Keras's own fit draws again in each step


def test_the_step_finds_the_generators():
    layer = StochasticDepth(RATE)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dropout(0.1)])
    (state,) = keras_internals.list_example_seeds(model)
    assert state is layer.seed_generator.state
    assert not any(state is other for other in keras_internals.list_seed_states(model))
    assert model.count_params() == 0
