"""Dropout masks differ by replica, microbatch and step, and are equal for equal seeds."""

import keras
import numpy as np
import pytest

import tftpu
from tests.support.models.strategies import Negative
from tests.support.steps import stepping

BATCH, FEATURES, KEEP = 64, 400, 0.7


def masks(
    count: int, gradient_accumulation_steps: int, steps: int = 1, seed: int = 0
) -> np.ndarray:
    """Returns the dropout mask of every example: (steps, examples, features), bool.

    Example i is the i-th unit vector, so only the i-th row of the kernel learns from it, and
    learns exactly where its mask let the gradient through.
    """
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        dense = keras.layers.Dense(FEATURES, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential(
            [keras.Input((BATCH,)), dense, keras.layers.Dropout(1 - KEEP, seed=9)]
        )
        model.compile(keras.optimizers.SGD(1.0), Negative(reduction="sum"))
    batches = [(np.eye(BATCH, dtype=np.float32), np.zeros(BATCH, np.int64), None)]
    step = stepping.make_step(
        engine, model, batches, gradient_accumulation_steps=gradient_accumulation_steps, seed=seed
    )
    found = []
    for _ in range(steps):
        before = dense.kernel.numpy()
        stepping.train(engine, step, batches)
        found.append(dense.kernel.numpy() - before > 0.5)
    return np.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(1, 1), (8, 1), (1, 4), (4, 4)], ids=str)
def test_no_two_examples_share_a_mask_and_the_keep_rate_is_right(parts):
    found = masks(*parts, steps=2).reshape(-1, FEATURES)
    assert len({mask.tobytes() for mask in found}) == len(found)
    error = np.sqrt(KEEP * (1 - KEEP) / found.size)
    assert abs(found.mean() - KEEP) < 3 * error
    # Independent: two masks agree by chance in keep^2 + drop^2 of the positions.
    agree = np.mean(found[:-1] == found[1:])
    assert abs(agree - (KEEP**2 + (1 - KEEP) ** 2)) < 0.02


@pytest.mark.slow
def test_a_repeated_run_draws_the_same_masks():
    first, again, other = masks(4, 2), masks(4, 2), masks(4, 2, seed=1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=-1).all()
