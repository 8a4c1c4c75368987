"""Losses that call Keras's own, and metrics of users: the same on one device and on four."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import tftpu
from tests.support.models.strategies import relative
from tftpu.errors import UserError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 6)).astype(np.float32)
Y = RNG.normal(size=(64, 1)).astype(np.float32)
MSE = keras.losses.MeanSquaredError()


class Super(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.abs(y_pred))


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(MSE(ops.zeros_like(x), x))
        return x


def by_function(model, batch, training):
    return MSE(batch[1], model(batch[0], training=training))


def mixed(model, batch, training):
    x, y = batch
    found = model(x, training=training)
    return ops.square(y - found)[:, 0] + MSE(y, found), {}


LOSSES = {
    "plain": (keras.Sequential, "mse", None),
    "super().compute_loss": (Super, "mse", None),
    "loss_fn": (keras.Sequential, None, by_function),
    "loss_fn of examples and of the batch": (keras.Sequential, None, mixed),
    "compile": (keras.Sequential, lambda y, found: MSE(y, found), None),
    "add_loss": (lambda layers: keras.Sequential([*layers, Penalty()]), "mse", None),
}


def trained(case: str, count: int) -> tuple[list[np.ndarray], dict[str, float], dict]:
    make, loss, loss_fn = LOSSES[case]
    with tftpu.connect(virtual_devices=count).scope():
        keras.utils.set_random_seed(1)
        model = make([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is one number for a batch
        trainer = tftpu.Trainer(model, loss_fn=loss_fn)
        history = trainer.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0).history
        return model.get_weights(), trainer.evaluate(X, Y, batch_size=32, return_dict=True), history


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_calls_keras_own_is_the_same_on_four_devices(case):
    (one, evaluated, history), (four, evaluated_4, history_4) = trained(case, 1), trained(case, 4)
    assert max(map(relative, four, one)) < 1e-5
    for name, value in evaluated.items():
        assert evaluated_4[name] == pytest.approx(value, rel=1e-5)
    assert history_4["loss"] == pytest.approx(history["loss"], rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("weights", [None, RNG.uniform(0.5, 2.0, 50).astype(np.float32)])
def test_a_sum_over_ragged_batches_is_evaluated_as_in_keras(count, weights):
    """Keras means the sums of the batches, each weighted by the number of its examples."""

    def summed() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
        return model

    with tftpu.connect(virtual_devices=count).scope():
        model = summed()
    x, y, options = X[:50], Y[:50], {"batch_size": 16, "sample_weight": weights}
    expected = summed().evaluate(x, y, verbose=0, **options)
    assert tftpu.Trainer(model).evaluate(x, y, **options, return_dict=True)[
        "loss"
    ] == pytest.approx(expected, 1e-6)


@pytest.mark.medium
def test_kerass_own_scaling_is_untouched_outside():
    with tftpu.connect(virtual_devices=4).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        tftpu.Trainer(model).fit(X, Y, batch_size=32, epochs=1, verbose=0)
        assert float(MSE(ops.zeros((4, 1)), ops.ones((4, 1)))) == 0.25  # divided by 4 replicas


def linear(metrics=None, loss="mse", **options) -> tftpu.Trainer:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", loss, metrics=metrics)
    return tftpu.Trainer(model, **options)


def test_no_loss_is_refused():
    with pytest.raises(UserError, match="There is no loss to train on"):
        linear(loss=None).fit(X, Y, epochs=1)


def test_a_loss_that_reaches_no_variable_is_refused():
    trainer = linear(loss=None, loss_fn=lambda model, batch, training: ops.square(batch[1])[:, 0])
    with pytest.raises(UserError, match="depends on no trainable variable"):
        trainer.fit(X, Y, epochs=1)


class Largest(keras.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(ops.maximum(self.seen, ops.max(ops.abs(y_pred))))

    def result(self):
        return self.seen.value


class Total(Largest):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(self.seen + ops.sum(ops.abs(y_pred)))


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_metric_that_is_no_sum_is_measured_on_whole_batches(method, count):
    y = np.zeros((64, 3))
    with tftpu.connect(virtual_devices=count).scope():
        trainer = linear([Largest()])
    expected = np.abs(trainer.model.predict(X, verbose=0)).max()
    if method == "evaluate":
        found = trainer.evaluate(X, y, return_dict=True)["largest"]
    else:
        found = trainer.fit(X, y, batch_size=64, verbose=0).history["largest"][0]
    assert found == pytest.approx(expected)


@pytest.mark.medium
def test_a_metric_of_sums_of_a_user_is_taken():
    trainer = linear([Total()])
    model = trainer.model
    expected = np.abs(model.predict(X[:50], verbose=0)).sum()
    assert trainer.evaluate(X[:50], np.zeros((50, 3)), return_dict=True)[
        "largest"
    ] == pytest.approx(expected)


@pytest.mark.medium
def test_a_model_that_keras_has_used_before_is_taken():
    trainer = linear([keras.metrics.MeanAbsoluteError()])
    y = np.zeros((64, 3))
    expected = trainer.model.evaluate(X, y, return_dict=True, verbose=0)
    found = trainer.evaluate(X, y, return_dict=True)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_metric_of_several_numbers_is_refused_before_training():
    y = np.eye(3, dtype=np.float32)[RNG.integers(0, 3, 64)]
    trainer = linear([keras.metrics.F1Score()])
    before = trainer.model.get_weights()
    with pytest.raises(UserError, match="'f1_score' returns 3 numbers"):
        trainer.fit(X, y, epochs=1)
    assert max(map(relative, trainer.model.get_weights(), before)) == 0.0


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_names_of_the_trainers_own_results_are_refused(name):
    def loss_fn(model, batch, training):
        found = ops.square(model(batch[0]))[:, 0]
        return found, {name: found}

    with pytest.raises(UserError, match=f"a value named '{name}'"):
        linear(loss=None, loss_fn=loss_fn).fit(X, Y, epochs=1)
