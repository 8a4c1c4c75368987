"""Batch normalisation over fixed groups: any number of replicas and microbatches, same numbers."""

import keras
import numpy as np
import pytest

import tftpu
from tests.support.models.strategies import dataset, relative
from tests.support.models.training import make_trainer
from tests.support.steps import stepping
from tftpu import models
from tftpu.errors import UserError
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.sizes import ResNet

BATCH, STEPS = 64, 3
PARTS = [(1, 4), (2, 1), (4, 4), (8, 1), (8, 2)]


def images(count: int = STEPS):
    rng = np.random.default_rng(5)
    return [
        (
            rng.normal(1.0, 2.0, (BATCH, 6, 6, 2)).astype(np.float32),
            rng.integers(0, 3, BATCH),
            None,
        )
        for _ in range(count)
    ]


def trained(count: int, gradient_accumulation_steps: int, norm_batch):
    """Returns the results, weights and evaluation logits of a small ResNet."""
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        keras.utils.set_random_seed(1)
        model = models.build(
            ResNet(
                "tiny",
                blocks=(1,),
                width=4,
                bottleneck=False,
                stem="small",
                image_size=6,
                channels=2,
                num_classes=3,
                norm_batch=norm_batch,
            )
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    step = stepping.make_step(
        engine, model, images(), gradient_accumulation_steps=gradient_accumulation_steps
    )
    results = stepping.train(engine, step, images())
    return results, model.get_weights(), model(images()[0][0], training=False).numpy()


def assert_equal(actual, expected):
    for key in ("loss", "accuracy"):
        np.testing.assert_allclose(
            [r[key] for r in actual[0]], [r[key] for r in expected[0]], rtol=2e-5
        )
    for a, e in zip(actual[1], expected[1]):
        assert relative(a, e) < 1e-4
    assert relative(actual[2], expected[2]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [pytest.param(p, marks=pytest.mark.slow if p[0] == 8 or p == (4, 4) else []) for p in PARTS],
    ids=str,
)
def test_ghost_batches_equal_one_device_in_training_and_evaluation(parts):
    assert_equal(trained(*parts, norm_batch=4), trained(1, 1, norm_batch=4))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_global_statistics_equal_one_device(count):
    one = trained(1, 1, norm_batch="global")
    assert_equal(trained(count, 1, norm_batch="global"), one)
    # One group of the full batch is equivalent.
    assert_equal(trained(1, 1, norm_batch=BATCH), one)


@pytest.mark.slow
def test_groups_matter():
    assert relative(trained(1, 1, 4)[1][0], trained(1, 1, BATCH)[1][0]) > 1e-3


@pytest.mark.medium
def test_a_share_without_complete_groups_fails_with_a_clear_error():
    with pytest.raises(ValueError, match="norm_batch=16 does not divide the batch of 8 examples"):
        trained(8, 1, norm_batch=16)


def test_a_ghost_batch_is_normalised_as_numpy_does_it():
    layer = GhostBatchNormalization(4, momentum=0.9, epsilon=1e-5)
    x = np.random.default_rng(0).normal(3.0, 2.0, (8, 5, 2)).astype(np.float32)
    y = np.asarray(layer(x, training=True))
    groups = x.reshape(2, 4 * 5, 2)
    mean, variance = groups.mean(1), groups.var(1)
    expected = (groups - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
    np.testing.assert_allclose(y.reshape(groups.shape), expected, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.1 * mean.mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        layer.moving_variance.numpy(), 0.9 + 0.1 * variance.mean(0), rtol=1e-5
    )


def test_devices_cannot_exchange_statistics_of_microbatches():
    engine = tftpu.connect(virtual_devices=2)
    with engine.scope():
        norm = keras.layers.BatchNormalization(synchronized=True, name="norm")
        model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    trainer = make_trainer(model, gradient_accumulation_steps=2)
    with pytest.raises(UserError, match=r"'norm' is synchronized: .*use one microbatch"):
        trainer.fit(np.ones((8, 6)), np.ones((8, 3)), batch_size=8, verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (2, 4)], ids=str)
def test_keras_own_statistics_are_the_mean_over_the_parts(parts):
    count, gradient_accumulation_steps = parts
    engine = tftpu.connect(virtual_devices=count)
    with engine.scope():
        norm = keras.layers.BatchNormalization(momentum=0.8)
        model = keras.Sequential(
            [keras.Input((6, 6, 2)), norm, keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = images(2)
    step = stepping.make_step(
        engine, model, batches, gradient_accumulation_steps=gradient_accumulation_steps
    )
    stepping.train(engine, step, batches)
    mean, variance = np.zeros(2), np.ones(2)
    for x, _, _ in batches:
        cut = x.reshape(count * gradient_accumulation_steps, -1, 2)
        mean = 0.8 * mean + 0.2 * cut.mean(1).mean(0)
        variance = 0.8 * variance + 0.2 * cut.var(1).mean(0)
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, rtol=1e-5)
    for variable in (norm.moving_mean, norm.moving_variance):
        copies = stepping.local_values(engine, variable)
        assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_share():
    """Moving statistics do not depend on the current batch."""
    data = dataset(images(1)).unbatch().batch(64)
    results = []
    for count in (1, 8):
        engine = tftpu.connect(virtual_devices=count)
        with engine.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((6, 6, 2)),
                    GhostBatchNormalization(4),
                    keras.layers.Flatten(),
                    keras.layers.Dense(3),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"])
        results.append(make_trainer(model).evaluate(data, return_dict=True))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
