"""Keras's own steps on several devices, each of which computes the whole batch."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tftpu
from tests.support.models.training import make_trainer
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.cluster import split_cpu
from tftpu.engines.tensorflow.own_steps import TensorFlowOwnSteps
from tftpu.errors import UserError

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = X[:, :1] * 2 - 1
COUNT = 3  # a number by which rounding differs


class Total(keras.metrics.Metric):
    """A sum that never starts again."""

    def __init__(self):
        super().__init__(name="total")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.value + keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def reset_state(self):
        pass

    def result(self):
        return self.value


class Measuring(keras.Sequential):
    """Computes a loss without Keras's, and keeps it in a metric."""

    def __init__(self, given):
        super().__init__(given)
        self.seen = keras.metrics.Mean(name="seen")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = keras.ops.mean((y - y_pred) ** 2)
        self.seen.update_state(loss * 4)
        return loss


def build(kind=keras.Sequential, **compiled) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5)]
    model = kind([*layers, keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | compiled)
    return model


def build_frozen():
    model = build()
    model.trainable = False
    return model


def build_embedding():
    keras.utils.set_random_seed(0)
    first, second = keras.Input((3,)), keras.Input((3,))
    embedding = keras.layers.Embedding(9, 4)  # whose gradients are slices
    both = keras.layers.Concatenate()([embedding(first), embedding(second)])
    model = keras.Model([first, second], keras.layers.Dense(1)(keras.layers.Flatten()(both)))
    model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)
    return model


def build_several():
    ours = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.02)
    return build(optimizer=keras.optimizers.MultiOptimizer(lambda v: ours["bias" in v.path]))


IDS = np.random.default_rng(1).integers(0, 9, (2, 40, 3))
KINDS = {
    "eager": (lambda: build(run_eagerly=True), X),
    "a metric that never starts again": (lambda: build(metrics=[Total()]), X),
    "an average": (
        lambda: build(optimizer=keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)),
        X,
    ),
    "several optimizers": (build_several, X),
    "compute_loss": (lambda: build(Measuring, loss=None), X),
    "nothing to train": (build_frozen, X),
    "slices": (build_embedding, [*IDS]),
    "sparse": (build, scipy.sparse.csr_matrix(X * (X > 0))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_device_takes_the_steps_that_keras_takes_on_one(kind):
    make, x = KINDS[kind]
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    theirs = make()
    expected = theirs.fit(x, Y, **arguments).history
    evaluated = theirs.evaluate(x, Y, verbose=0, return_dict=True)
    with tftpu.connect(virtual_devices=COUNT).scope():
        ours = make()
    trainer = make_trainer(ours)
    with pytest.warns(UserWarning, match=f"each of the {COUNT} devices computes the whole batch"):
        found = trainer.fit(x, Y, **arguments).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    assert trainer.evaluate(x, Y, return_dict=True) == pytest.approx(evaluated, rel=1e-5)
    np.testing.assert_allclose(trainer.predict(x), theirs.predict(x, verbose=0), atol=1e-5)
    if kind != "sparse":
        few = keras.tree.map_structure(lambda array: array[:5], x)
        found = trainer.executor.predict_batch(few)
        np.testing.assert_allclose(found, theirs.predict_on_batch(few), atol=1e-5)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(a, e, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    def train(workdir, epochs):
        with tftpu.connect(virtual_devices=4).scope():
            model = build(metrics=[Total()])
        trainer = make_trainer(model, workdir)
        history = trainer.fit(X, Y, batch_size=16, epochs=epochs, verbose=0).history
        return history, model.get_weights()

    train(tmp_path / "parts", 1)
    (parts, weights), (whole, expected) = train(tmp_path / "parts", 3), train(tmp_path / "whole", 3)
    assert parts == whole
    for a, e in zip(weights, expected):
        np.testing.assert_array_equal(a, e)


@pytest.mark.medium
def test_a_run_with_several_optimizers_resumes_within_an_epoch(tmp_path):
    def train(workdir, steps):
        model = build_several()
        make_trainer(model, workdir).fit(X, Y, batch_size=16, steps=steps, verbose=0)
        return model.get_weights()

    train(tmp_path / "parts", 4)
    both = train(tmp_path / "parts", 7), train(tmp_path / "whole", 7)
    for a, e in zip(*both):
        np.testing.assert_array_equal(a, e)


def counting(counter):
    class Counting(Measuring):
        def compute_loss(self, *args, **kwargs):
            counter.assign_add(1.0)
            return super().compute_loss(*args, **kwargs)

    return build(Counting, loss=None)


@pytest.mark.slow
def test_a_variable_outside_of_the_model_is_saved(tmp_path):
    def train(epochs):
        with tftpu.connect(virtual_devices=2).scope():
            counter = tf.Variable(0.0, trainable=False)
            model = counting(counter)
        make_trainer(model, tmp_path).fit(X, Y, batch_size=16, epochs=epochs, verbose=0)
        return float(counter.numpy())

    assert train(1) == 3.0
    assert train(3) == 9.0


@pytest.mark.medium
def test_a_variable_of_one_device_is_refused_by_name():
    engine = tftpu.connect(virtual_devices=2)
    counter = tf.Variable(0.0, trainable=False, name="counter")
    with engine.scope():
        model = counting(counter)
    with pytest.raises(UserError, match="changes 'counter"):
        make_trainer(model).fit(X, Y, batch_size=16, verbose=0)
    assert float(counter.numpy()) == 0.0


def test_the_collectives_of_several_gpus_change_no_variable():
    split_cpu(2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # not the sums of virtual CPUs
    with strategy.scope():
        model = build(metrics=[Total()])
    batch = keras.KerasTensor((4, 6)), keras.KerasTensor((4, 1)), None
    with strategy.scope():
        TensorFlowOwnSteps(strategy, model, batch)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"use_ema": True, "ema_overwrite_frequency": 2}, "use_ema=True"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ],
)
def test_what_replicas_cannot_do_in_some_steps_only_is_refused(optimizer, said):
    with tftpu.connect(virtual_devices=2).scope():
        model = build(optimizer=keras.optimizers.SGD(0.01, **optimizer))
        with pytest.raises(UserError, match=f"{said}.* trains on one device only"):
            make_trainer(model)


@pytest.mark.slow
def test_batches_that_devices_cannot_share_train_as_on_one():
    def losses(count):
        with tftpu.connect(virtual_devices=count).scope():
            model = build(metrics=["mae"])
        trainer = make_trainer(model, steps_per_loop=2)
        history = trainer.fit(X[:34], Y[:34], batch_size=5, steps=9, eval_every=3).history
        return [*history["loss"], *history["mae"], *np.concatenate(trainer.predict(X))]

    np.testing.assert_allclose(losses(COUNT), losses(1), rtol=1e-5)


def test_the_mean_of_the_gradients_of_replicas_is_what_optimizers_get():
    strategy = tftpu.connect(virtual_devices=4).strategy
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

        def update():
            optimizer.apply([tf.constant(0.5)], [variable])

        strategy.run(tf.function(update))
        assert float(variable.numpy()) == 1.0 - 4 * 0.5
        with internals.averaged_gradients():
            strategy.run(tf.function(lambda: update()))
        assert float(variable.numpy()) == 1.0 - 4 * 0.5 - 0.5
