"""16-bit policies: the same numbers up to the format's rounding; overflow skips everywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, random_batches, relative
from tests.support.models.training import make_trainer
from tests.support.steps import stepping

STEPS, BATCH = 5, 64
# The unit roundoff of each format: its significand has 8 or 11 bits.
ROUNDOFF = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}


def trained(
    policy: str,
    count: int,
    gradient_accumulation_steps: int,
    batches=None,
    scale: float | None = None,
):
    """Returns engine, step, initial weights and results of five steps under a policy."""
    keras.config.set_dtype_policy(policy)
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        model = mlp()
        before = model.get_weights()
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    batches = batches or random_batches(STEPS, BATCH, False)
    step = stepping.make_step(
        engine, model, batches, gradient_accumulation_steps=gradient_accumulation_steps
    )
    if scale is not None:
        model.optimizer.dynamic_scale.assign(scale)
    return engine, step, before, stepping.train(engine, step, batches)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROUNDOFF)
@pytest.mark.parametrize("parts", [(8, 1), (2, 4)], ids=str)
def test_equals_float32_up_to_rounding(policy, parts):
    _, exact, before, _ = trained("float32", 1, 1)
    _, step, _, results = trained(policy, *parts)
    # Each update is a sum of products of rounded factors: a few roundoffs.
    for w, e, b in zip(step.state.model.get_weights(), exact.state.model.get_weights(), before):
        assert 0 < relative(w - b, e - b) < 4 * ROUNDOFF[policy]
    assert np.isfinite([r["loss"] for r in results]).all()


@pytest.mark.medium
@pytest.mark.parametrize("parts", [(4, 1), (2, 4)], ids=str)
def test_an_overflow_on_one_replica_skips_the_update_on_all_and_halves_the_scale(parts):
    batches = random_batches(1, BATCH, True)
    # The last example, of the last replica and the last microbatch: beyond float16's 65,504.
    batches[0][2][BATCH - 1] = 1e7
    engine, step, before, results = trained("mixed_float16", *parts, batches, scale=1024.0)
    assert results[0]["skipped_steps"] == 1
    assert float(step.state.model.optimizer.dynamic_scale.numpy()) == 512.0
    assert int(step.state.groups[0].optimizer.iterations.numpy()) == 0
    assert int(step.state.step.numpy()) == 1  # the batch counts nevertheless
    for variable, initial in zip(step.state.model.trainable_variables, before):
        for copy in stepping.local_values(engine, variable):
            np.testing.assert_array_equal(copy, initial)


@pytest.mark.medium
def test_without_an_overflow_the_same_step_moves_the_weights():
    _, step, before, results = trained(
        "mixed_float16", 4, 1, random_batches(1, BATCH, False), scale=1024.0
    )
    assert results[0]["skipped_steps"] == 0
    assert float(step.state.model.optimizer.dynamic_scale.numpy()) == 1024.0
    assert int(step.state.groups[0].optimizer.iterations.numpy()) == 1
    assert relative(step.state.model.get_weights()[0], before[0]) > 1e-4


@pytest.mark.medium
def test_the_scale_doubles_after_enough_steps_without_overflow():
    keras.config.set_dtype_policy("mixed_float16")
    engine = tftpu.connect(virtual_devices=2)
    with engine.scope():
        model = mlp()
        inner = keras.optimizers.SGD(0.05)
        scaler = keras.optimizers.LossScaleOptimizer(inner, 256.0, dynamic_growth_steps=3)
        model.compile(scaler, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = random_batches(STEPS, BATCH, False)
    step = stepping.make_step(engine, model, batches)
    stepping.train(engine, step, batches)
    assert float(model.optimizer.dynamic_scale.numpy()) == 512.0
    assert int(model.optimizer.step_counter.numpy()) == 2


@pytest.mark.medium
def test_an_epoch_whose_steps_all_overflow_has_no_loss_and_no_metrics():
    keras.config.set_dtype_policy("mixed_float16")
    with tftpu.connect(virtual_devices=2).scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
    (first, _, third) = random_batches(3, 16, True)
    first[2][:] = 1e9  # beyond float16's 65,504
    data = tf.data.Dataset.from_tensor_slices(tuple(map(np.concatenate, zip(first, third))))
    history = make_trainer(model).fit(data.batch(16), epochs=2, steps_per_epoch=1).history
    for name in ("loss", "accuracy"):
        assert np.isnan(history[name]).tolist() == [True, False], name
    assert {len(values) for values in history.values()} == {2}


@pytest.mark.medium
def test_a_loss_that_stays_infinite_at_the_least_scale_ends_the_run():
    keras.config.set_dtype_policy("mixed_float16")
    model = mlp()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ((x, y, _),) = random_batches(1, 16, False)
    batches = tf.data.Dataset.from_tensors((x * np.inf, y))
    with pytest.raises(tftpu.UserError, match="no longer finite between step 11 and step 15"):
        make_trainer(model, steps_per_loop=5).fit(batches, steps=100)
