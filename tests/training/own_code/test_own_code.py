"""Code of users that reaches beyond sums over examples: as in Keras's own fit, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tftpu
from tests.support.models import own_code
from tests.support.models.own_code import CASES, RUN, X, Y
from tests.support.models.strategies import relative
from tests.support.programs import jax_process
from tftpu.errors import UserError


@pytest.fixture(scope="module")
def expected():
    """Returns the weights and losses of each case in Keras's fit on one device."""
    return {case: own_code.fitted(case) for case in CASES}


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory):
    """Returns those of the JAX engine."""
    file = tmp_path_factory.mktemp("jax") / "results.npz"
    jax_process.output("models.own_code", str(file))
    return dict(np.load(file))


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert relative(one, other) < 1e-5
    # Keras weighs the means of batches by their examples, not by their divisors.
    assert relative(found[-1], expected[-1]) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_trains_as_in_keras(expected, case, devices, microbatches):
    engine = tftpu.connect(virtual_devices=devices)
    assert_equal(own_code.fitted(case, engine, microbatches), expected[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(f"{c} {n}" for c in CASES for n in (1, 4)), "spectral in microbatches"]
)
def test_trains_as_in_keras_on_jax(expected, on_jax, case):
    found = {name: value for name, value in on_jax.items() if name.startswith(f"{case} ")}
    numbers = range(len(found))
    assert_equal([found[f"{case} {i}"] for i in numbers], expected[case.split()[0]])


def model_of(devices: int = 1) -> keras.Model:
    with tftpu.connect(virtual_devices=devices).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd")
    return model


def squares(model, batch, training):
    return ops.square(model(batch[0], training=training) - batch[1])[:, 0]


def assigned(variable):
    def loss_fn(model, batch, training):
        variable.assign_add(1.0)
        return squares(model, batch, training) * variable

    return loss_fn


def assigned_in_branch(variable):
    def loss_fn(model, batch, training):
        loss = squares(model, batch, training)
        return loss * tf.cond(loss[0] > 1.0, lambda: variable.assign_add(1.0), lambda: 1.0)

    return loss_fn


def assigned_in_evaluation(variable):
    def loss_fn(model, batch, training):
        if not training:
            variable.assign_add(1.0)
        return squares(model, batch, training)

    return loss_fn


def drawn(variable):
    generator = tf.random.Generator.from_seed(1)
    return lambda model, batch, training: squares(model, batch, training) * generator.uniform(())


def queued(variable):
    queue = tf.queue.FIFOQueue(4, tf.float32, shapes=[()])

    def loss_fn(model, batch, training):
        queue.enqueue(1.0)
        return squares(model, batch, training) * queue.dequeue()

    return loss_fn


def inserted(variable):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    @tf.function(autograph=False)
    def insert():
        table.insert(tf.constant([1], tf.int64), tf.constant([1.0]))

    def loss_fn(model, batch, training):
        insert()
        return squares(model, batch, training)

    return loss_fn


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (assigned, "the variable 'counter:0'"),
        (assigned_in_branch, "the variable 'counter:0'"),
        (assigned_in_evaluation, "the variable 'counter:0'"),
        (drawn, "the variable 'StateVar:0'"),
        (queued, r"a resource such as a queue or a table \(Queue(En|De)queueV2\)"),
        (inserted, r"a resource such as a queue or a table \(LookupTableInsertV2\)"),
    ],
)
def test_a_variable_outside_the_model_that_a_loss_changes_is_refused_before_it_changes(
    make, name, devices
):
    model = model_of(devices)
    counter = tf.Variable(1.0, name="counter")
    trainer = tftpu.Trainer(model, loss_fn=make(counter))
    with pytest.raises(UserError, match=f"changes {name}, which is not part"):
        trainer.fit(X, Y, **RUN, validation_data=(X, Y))
    assert (trainer.step, float(counter)) == (0, 1.0)


class Table(keras.layers.Layer):
    """Looks its inputs up in every way that TensorFlow has, and writes a summary."""

    def __init__(self, directory):
        super().__init__()
        pairs = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), tf.constant([2.0, 5.0]))
        self.table = tf.lookup.StaticHashTable(pairs, -1.0)
        self.within = tf.function(self.table.lookup, autograph=False)
        self.writer = tf.summary.create_file_writer(directory)

    def call(self, x):
        keys = tf.cast(x > 0, tf.int32)
        size = tf.cast(self.table.size(), tf.float32)
        values = tf.cond(tf.reduce_all(keys > 0), lambda: x, lambda: size * self.table.lookup(keys))
        values += tf.map_fn(self.table.lookup, keys, fn_output_signature=tf.float32)
        values += tf.switch_case(0 * keys[0, 0], [lambda: self.within(keys), lambda: 0.0 * values])
        with self.writer.as_default():
            tf.summary.scalar("first", values[0, 0], step=0)
        return values


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_tables_are_read_and_summaries_written_in_functions_and_branches(devices, tmp_path):
    keras_model = own_code.dense(Table(str(tmp_path)))
    with tftpu.connect(virtual_devices=devices).scope():
        model = own_code.dense(Table(str(tmp_path)))
    model.set_weights(keras_model.get_weights())
    expected = keras_model.fit(X, Y, **RUN).history["loss"]
    trainer = tftpu.Trainer(model)
    assert trainer.fit(X, Y, **RUN).history["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, 4])
def test_a_variable_outside_the_model_that_a_callback_sets_is_read_in_each_step(devices):
    model = model_of(devices)
    factor = tf.Variable(1.0)

    def loss_fn(model, batch, training):
        return 0.0 * squares(model, batch, training) + factor

    setting = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: factor.assign(epoch)
    )
    history = tftpu.Trainer(model, loss_fn=loss_fn).fit(X, Y, **RUN, callbacks=[setting]).history
    assert history["loss"] == [0.0, 1.0]


class ScaledByBatch(keras.layers.Dense):
    def call(self, inputs):
        self.kernel.assign(self.kernel * ops.mean(inputs))
        return super().call(inputs)


class Noisy(keras.layers.Dense):
    def __init__(self, units):
        super().__init__(units)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        self.kernel.assign(self.kernel * keras.random.normal((), seed=self.seeds))
        return super().call(inputs)


class NoisyByTensorFlow(keras.layers.Dense):
    def call(self, inputs):
        self.kernel.assign(self.kernel * tf.random.normal(()))
        return super().call(inputs)


class NoisyInAFunction(keras.layers.Dense):
    def call(self, inputs):
        self.kernel.assign(self.kernel * tf.function(tf.random.uniform)(()))
        return super().call(inputs)


@pytest.mark.parametrize("layer", [ScaledByBatch, Noisy, NoisyByTensorFlow, NoisyInAFunction])
def test_an_assigned_weight_that_would_differ_by_device_is_refused_on_several(layer):
    with tftpu.connect(virtual_devices=2).scope():
        model = own_code.dense(layer(5))
    with pytest.raises(UserError, match=r"assigns its weight .*kernel' a value that depends on"):
        tftpu.Trainer(model).fit(X, Y, **RUN)


def test_gradients_by_the_models_own_variables():
    def penalty(take):
        def loss_fn(model, batch, training):
            values = take(model)
            with tf.GradientTape() as tape:
                tape.watch([v for v in values if not isinstance(v, keras.Variable)])
                loss = squares(model, batch, training)
                mean = ops.mean(loss)
            grads = tape.gradient(mean, values)
            return loss + sum(ops.sum(ops.square(g)) for g in grads)

        return loss_fn

    for devices in (1, 4):
        with pytest.raises(UserError, match=r"values = \[v\.value for v in"):
            trainer = tftpu.Trainer(
                model_of(devices), loss_fn=penalty(lambda model: model.trainable_variables)
            )
            trainer.fit(X, Y, **RUN)
    model = model_of()
    kernel, bias = (v.numpy() for v in model.trainable_variables)
    trainer = tftpu.Trainer(
        model, loss_fn=penalty(lambda model: [v.value for v in model.trainable_variables])
    )
    found = trainer.evaluate(X, Y, batch_size=64, return_dict=True)["loss"]
    error = X @ kernel + bias - Y
    slope, offset = 2 * X.T @ error / 64, 2 * error.mean()
    closed = (error**2).mean() + (slope**2).sum() + offset**2
    assert found == pytest.approx(closed, rel=1e-5)


@pytest.mark.slow
def test_training_under_deterministic_ops_is_the_same():
    usual = own_code.fitted("masked", tftpu.connect(virtual_devices=2))
    tf.config.experimental.enable_op_determinism()
    try:
        found = own_code.fitted("masked", tftpu.connect(virtual_devices=2))
    finally:
        from tensorflow.python.framework import config

        config.disable_op_determinism()
    assert_equal(found, usual)


def test_a_whole_loss_of_several_numbers_is_refused():
    class Several(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.square(y_true - y_pred)

    with pytest.raises(UserError, match=r"its own __call__ that returns the shape \(16, 1\)"):
        tftpu.Trainer(own_code.dense(loss=Several())).fit(X, Y, **RUN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lookup",
            "UserError: The layer 'lookup' is a IntegerLookup, which works only under TensorFlow",
        ),
        ("nan", "UserError: y, the labels, has the value nan in the examples "),
        ("read", "UserError: The loss reads the variable 'factor', which has changed"),
    ],
)
def test_what_a_step_of_jax_cannot_do_is_refused(on_jax, name, message):
    assert str(on_jax[f"message {name}"]).startswith(message)


STEPS_AND_RATES = [
    *[[1.5, 5.5], [1 / 64, 1 / 128]],  # the steps 0 to 3, and 4 to 7
    *[[4.0, 8.0], [1 / 64, 1 / 128]],  # an evaluation after each epoch
]


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, 4])
def test_a_loss_reads_the_optimizers_variables_as_they_are_in_each_step(devices):
    found = own_code.read_from_the_optimizer(tftpu.connect(virtual_devices=devices))
    np.testing.assert_allclose(found, STEPS_AND_RATES)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_a_loss_reads_them_so_on_jax(on_jax, devices):
    np.testing.assert_allclose(on_jax[f"optimizer {devices}"], STEPS_AND_RATES)


@pytest.mark.parametrize("labels", [{"a": Y}, {"a": Y, "c": Y}])
def test_labels_that_a_loss_needs_are_named(labels):
    model = own_code.outputs(own_code.crossentropy())
    with pytest.raises(UserError, match=r"losses for 'a', 'b': give labels for 'b'"):
        tftpu.Trainer(model).fit(X, labels, **RUN)
