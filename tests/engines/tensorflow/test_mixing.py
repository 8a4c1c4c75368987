"""Models whose examples depend on each other are warned of; padding is never counted."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tftpu
from tests.support.models.strategies import relative
from tests.support.models.training import make_trainer
from tftpu.engines.tensorflow import mixing
from tftpu.errors import UserError

STEPS, BATCH, EXAMPLES, FEATURES = 6, 16, 56, 6
RNG = np.random.default_rng(5)
X = RNG.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
Y = RNG.normal(size=(EXAMPLES, 3)).astype(np.float32)


def batches(count: int = EXAMPLES) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(BATCH)


def values(model) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def engines(replicas: int):
    return tftpu.connect("none", virtual_devices=replicas)


class OwnNormalization(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


def sequential(*layers, loss="mse") -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3), *layers])
    model.compile("sgd", loss)
    return model


def pairs(model, batch, training):
    outputs = model(batch[0], training=training)
    return ops.mean(outputs @ ops.transpose(tftpu.all_gather(outputs)), axis=-1)


@pytest.mark.medium
def test_a_model_that_mixes_its_examples_is_warned_of():
    for layer, sentence in (
        (OwnNormalization(), "depends on the other examples"),
        (keras.layers.BatchNormalization(name="norm"), "'norm'.* normalizes over the examples"),
    ):
        with pytest.warns(UserWarning, match=sentence):
            make_trainer(sequential(layer)).fit(batches(), steps=1, verbose=False)


@pytest.mark.slow
def test_a_model_that_does_not_mix_its_examples_is_not(recwarn):
    dropout = keras.layers.Lambda(lambda x: ops.tanh(x)), keras.layers.Dropout(0.5)
    make_trainer(sequential(*dropout)).fit(batches(), steps=1, verbose=False)
    engine = engines(2)
    with engine.scope():
        gathering = tftpu.Trainer(sequential(loss=None), loss_fn=pairs)
    gathering.fit(batches(), steps=1, verbose=False)  # mixes, in a way that all devices share
    assert not [w for w in recwarn if "number of devices" in str(w.message)]


@pytest.mark.slow
def test_activity_regularizers_are_exact_on_four_replicas_and_do_not_see_padding():
    def make():
        keras.utils.set_random_seed(6)
        layer = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))
        return sequential(layer)

    expected = make()
    data = batches()
    expected.fit(
        data.repeat().rebatch(BATCH, drop_remainder=True), steps_per_epoch=STEPS, verbose=0
    )
    engine = engines(4)
    with engine.scope():
        trainer = make_trainer(make())
    trainer.fit(data, steps=STEPS, verbose=False)
    assert relative(values(trainer.model), values(expected)) < 2e-6
    assert trainer.evaluate(data, return_dict=True)["loss"] == pytest.approx(
        expected.evaluate(data, verbose=0), rel=1e-5
    )


@pytest.mark.medium
def test_a_metric_that_ignores_weights_does_not_see_padding():
    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.seen = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

        def result(self):
            return self.seen

    engine = engines(4)
    with engine.scope():
        model = sequential()
        model.compile("sgd", "mse", metrics=[Count()])
        trainer = make_trainer(model)
    assert trainer.evaluate(batches(41), return_dict=True)["count"] == 41


def centred(y_true, y_pred):
    """A metric whose value for an example depends on its batch."""
    return ops.mean(ops.abs(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


class Adding(keras.layers.Layer):
    """Adds the sum of its inputs to the loss."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.abs(x)))
        return x


@pytest.mark.medium
def test_a_metric_that_mixes_examples_is_warned_of():
    with engines(4).scope():
        model = sequential()
        model.compile("sgd", "mse", metrics=[centred])
    with pytest.warns(UserWarning, match="The metric of an example depends on the other examples"):
        make_trainer(model).fit(batches(), steps=1, verbose=False)


@pytest.mark.medium
@pytest.mark.parametrize("layer", [OwnNormalization, Adding, None])
def test_what_mixes_its_examples_is_evaluated_in_the_batches_of_keras(layer):
    def make():
        model = sequential(*([layer()] if layer else []))
        model.compile("sgd", "mse", metrics=[centred])
        return model

    expected = make().evaluate(batches(), verbose=0, return_dict=True)
    with engines(4).scope():
        trainer = make_trainer(make())
    assert trainer.evaluate(batches(), return_dict=True) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_an_added_loss_that_is_no_mean_trains_on_whole_batches(devices):
    with engines(devices).scope():
        ours = sequential(Adding())
    expected = sequential(Adding())
    make_trainer(ours).fit(batches(48), steps=3, verbose=False)
    expected.fit(batches(48), verbose=0)
    assert relative(values(ours), values(expected)) < 2e-6


@pytest.mark.slow
def test_an_added_loss_that_is_no_mean_is_refused_with_microbatches():
    with engines(1).scope():
        trainer = make_trainer(sequential(Adding()), gradient_accumulation_steps=2)
    with pytest.raises(UserError, match="add_loss grows with the number of examples"):
        trainer.fit(batches(), steps=1, verbose=False)


class Sampling(keras.layers.Layer):
    """Draws from a normal distribution, and adds the mean of its divergence, as a VAE does."""

    def __init__(self, reduce=ops.mean, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)
        self.reduce = reduce

    def call(self, x):
        z = x + 2.0 * keras.random.normal(ops.shape(x), seed=self.seeds)
        self.add_loss(self.reduce(ops.square(z) + z - 5.0))  # nearly 0, and of any sign
        return z


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_of_random_numbers_is_neither_refused_nor_evaluated_undivided(replicas, recwarn):
    with engines(replicas).scope():
        trainer = make_trainer(sequential(Sampling()), gradient_accumulation_steps=2)
    trainer.fit(batches(48), steps=1, verbose=False, validation_data=batches(41))
    state = trainer.executor.variables
    assert not mixing.is_mixed_in_evaluation(state, lambda: batches(41))
    assert not [w for w in recwarn if "other examples" in str(w.message)]


@pytest.mark.medium
def test_a_sum_of_random_numbers_is_found_beside_large_regularizers():
    with engines(2).scope():
        dense = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(100.0))
        model = sequential(dense, Sampling(lambda value: ops.sum(value + 5.0)))
    said = "add_loss grows with the number of examples.* each of the 2 devices computes the whole"
    with pytest.warns(match=said):
        make_trainer(model).fit(batches(), steps=1, verbose=False)
