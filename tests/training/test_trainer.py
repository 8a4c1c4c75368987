"""`Trainer`: fit, evaluate and predict against Keras's own; callbacks; non-finite losses."""

import csv
import json
import math
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp, relative
from tests.support.models.training import STEPS, compiled, data, examples, make_trainer
from tftpu.config import OPTIMIZERS, OptimizerConfig
from tftpu.errors import UserError
from tftpu.optim import optimizers


@pytest.mark.slow
def test_fit_equals_keras_fit_on_one_device():
    """Keras's own trainer on the same batches in the same order is the reference."""
    ours, theirs = compiled(), compiled()
    batches = data().repeat(2)
    history = make_trainer(ours).fit(batches, steps=STEPS, validation_data=data(), eval_every=6)
    theirs_history = theirs.fit(data(), epochs=2, validation_data=data(), verbose=0)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 1e-5
    for name, values in theirs_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


USUAL = ("adamw", "lamb", "lars", "sgd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ],
)
def test_every_optimizer_equals_keras_fit_on_four_replicas(name):
    config = OptimizerConfig(name, learning_rate=0.02, warmup_steps=2, weight_decay=0.05)
    with tftpu.connect(virtual_devices=4).scope():
        ours = compiled(optimizer=optimizers.build(config, 16, STEPS))
    theirs = compiled(optimizer=optimizers.build(config, 16, STEPS))
    make_trainer(ours).fit(data(), steps=STEPS)
    theirs.fit(data().repeat(2), verbose=0)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 2e-5


@pytest.mark.slow
def test_sample_weights_work_as_in_keras():
    x, y = examples()
    w = np.random.default_rng(2).uniform(0.1, 3.0, len(y)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, y, w)).batch(16)
    results = []
    for count in (1, 4):
        with tftpu.connect(virtual_devices=count).scope():
            model = compiled(weighted_metrics=["accuracy"])
        make_trainer(model).fit(batches, steps=6)
        results.append(model.get_weights())
    theirs = compiled()
    theirs.fit(batches, verbose=0)
    for one, four, keras_own in zip(*results, theirs.get_weights()):
        assert relative(one, keras_own) < 1e-5
        assert relative(four, keras_own) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("kind", [int, float, np.float32])
def test_class_weights_work_as_in_keras(one_hot, kind):
    batches = data()
    options = {}
    if one_hot:
        batches = batches.map(lambda x, y: (x, tf.one_hot(y, 4)))
        options["loss"] = keras.losses.CategoricalCrossentropy(from_logits=True)
    ours, theirs = compiled(**options), compiled(**options)
    weights = {0: 0.5, 1: 2.0, 3: 4.0}
    given = {kind(label): weight for label, weight in weights.items()}
    make_trainer(ours).fit(batches, steps=6, class_weight=given)
    theirs.fit(batches, verbose=0, class_weight=weights)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 1e-5


@pytest.mark.slow
def test_the_step_is_traced_once_over_a_fit_with_evaluation():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, x, training=False):
            traces.append(training)
            return x

    layers = [keras.Input((6,)), Counting(), keras.layers.Dense(4)]
    model = compiled(keras.Sequential(layers))
    trainer = make_trainer(model, steps_per_loop=4)
    traces.clear()
    trainer.fit(data(), steps=10, validation_data=data(batch=20), eval_every=5)
    # Keras builds the model, the guard tries the layer of its own, the step inspects it; whether
    # padding matters, which also finds wrong validation data; the guard of the evaluation, as the
    # data do not divide into its batches; one trace each to train and to evaluate.
    assert traces == [False, True, True, False, False, True, False]
    trainer.fit(data(), steps=20, validation_data=data(batch=20))
    assert len(traces) == 7


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_evaluation_counts_every_example_once(count):
    with tftpu.connect(virtual_devices=count).scope():
        model = compiled()
    odd = data(batch=64, count=77)  # 64 + 13, and 13 is not a multiple of 8
    expected = compiled().evaluate(odd, verbose=0, return_dict=True)
    assert make_trainer(model).evaluate(odd, return_dict=True) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_the_digits_give_the_same_accuracy_on_eight_replicas_as_keras_on_one_device():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    everything = tf.data.Dataset.from_tensor_slices((x, digits.target)).batch(64)
    with tftpu.connect(virtual_devices=8).scope():
        model = compiled(mlp(64, 10), optimizer=keras.optimizers.Adam(0.01))
    make_trainer(model).fit(everything, steps=40)
    one = compiled(mlp(64, 10))
    one.set_weights(model.get_weights())
    expected = one.evaluate(everything, verbose=0, return_dict=True)
    results = make_trainer(model).evaluate(everything, return_dict=True)
    assert round(results["accuracy"] * 1797) == round(expected["accuracy"] * 1797)
    assert 0.3 < results["accuracy"] < 1.0
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 4])
def test_predict_gives_every_example_in_order(count):
    with tftpu.connect(virtual_devices=count).scope():
        model = compiled()
    outputs = make_trainer(model).predict(data(batch=20, count=77))
    np.testing.assert_allclose(outputs, mlp()(examples(77)[0]).numpy(), rtol=1e-5, atol=1e-6)


def test_outputs_of_several_rows_for_each_example_are_refused():
    words = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 2)))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), words])
    with pytest.raises(UserError, match=r"the shape \(20, 2\) for a batch of 10 examples"):
        make_trainer(compiled(model)).predict(examples(10)[0], batch_size=10)


@pytest.mark.medium
def test_a_ragged_last_batch_is_carried_over():
    """77 examples in batches of 20, endlessly: no example is lost."""
    seen = []

    class Watch(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.cast(y_true, "float32") + 0.0 * y_pred[:, 0]

    model = compiled(loss=Watch(reduction="sum"), metrics=[])
    x, _ = examples(77)
    numbered = tf.data.Dataset.from_tensor_slices((x, np.arange(77))).batch(20)

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

    make_trainer(model, steps_per_loop=1).fit(numbered, steps=8, callbacks=[Record()])
    stream = np.tile(np.arange(77), 3)[: 8 * 20].reshape(8, 20).sum(1)
    np.testing.assert_allclose(seen, np.cumsum(stream) / np.arange(1, 9))  # logs are means so far


@pytest.mark.medium
def test_evaluation_uses_the_ema():
    model = compiled()
    trainer = make_trainer(model, ema_momentum=0.8)
    trainer.fit(data(), steps=STEPS)
    averaged = compiled()
    averaged.set_weights([v.numpy() for v in trainer.executor.variables.averages])
    expected = averaged.evaluate(data(), verbose=0, return_dict=True)
    live = model.evaluate(data(), verbose=0, return_dict=True)
    assert trainer.evaluate(data(), return_dict=True) == pytest.approx(expected, rel=1e-5)
    assert abs(live["loss"] - expected["loss"]) > 1e-3


@pytest.mark.slow
def test_callbacks_are_called_and_obeyed(tmp_path):
    calls = []

    class Own(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            calls.append("begin")

        def on_epoch_end(self, epoch, logs=None):
            calls.append((epoch, sorted(logs)))

        def on_train_end(self, logs=None):
            calls.append("end")

    rates = []
    model = compiled(optimizer=keras.optimizers.SGD(0.1))
    callbacks = [
        Own(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1)),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
        ),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True),
        keras.callbacks.TensorBoard(str(tmp_path / "board")),
    ]
    history = make_trainer(model).fit(
        data(), steps=18, validation_data=data(), eval_every=6, callbacks=callbacks
    )
    assert calls[0] == "begin" and calls[-1] == "end" and len(calls) == 5
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(calls[1][1])
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(r["loss"]) for r in rows] == pytest.approx(history.history["loss"])
    assert history.epoch == [0, 1, 2]
    saved = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_allclose(saved.get_weights()[0], model.get_weights()[0])
    assert any((tmp_path / "board").rglob("events*"))


@pytest.mark.slow
def test_early_stopping_and_reduce_on_plateau_act():
    model = compiled(optimizer=keras.optimizers.SGD(0.0))  # learns nothing: a plateau
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
    reduce = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1e-3)
    history = make_trainer(model).fit(
        data(), steps=100, validation_data=data(), eval_every=6, callbacks=[stop, reduce]
    )
    assert len(history.epoch) == 4


@pytest.mark.medium
def test_a_run_that_a_callback_ends_logs_its_last_steps(tmp_path):
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100)
    make_trainer(compiled(), tmp_path).fit(data(), steps=24, eval_every=6, callbacks=[stop])
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert (line["step"], line["split"]) == (12, "train")


@pytest.mark.medium
def test_a_callback_that_fails_at_the_end_leaves_nothing_running(tmp_path):
    class Failing(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(compiled(), tmp_path).fit(data(), steps=4, callbacks=[Failing()])
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}
    assert json.loads((tmp_path / "goodput.json").read_text())["state"] == "finished"


# A loss that is not finite


def poisoned(bad: range, steps: int = 40) -> tf.data.Dataset:
    x, y = examples()
    x, y = np.tile(x[:16], (steps, 1, 1)), np.tile(y[:16], (steps, 1))
    for step in bad:
        x[step] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.medium
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    trainer = make_trainer(compiled(), tmp_path, steps_per_loop=5, checkpoint_every=10)
    with pytest.raises(
        UserError, match=r"between step 16 and step 20 \(last finite: loss .*step 10"
    ):
        trainer.fit(poisoned(range(17, 18)), steps=40)
    assert trainer.checkpoints.list_steps() == [10]
    again = make_trainer(compiled(), tmp_path)
    assert again.fit(poisoned(range(0)), steps=40).epoch == [0]
    assert all(np.isfinite(w).all() for w in again.model.get_weights())


@pytest.mark.medium
def test_rollback_skips_the_bad_batches(tmp_path):
    options = {"steps_per_loop": 5, "log_every": 10, "checkpoint_every": 10}
    trainer = make_trainer(compiled(), tmp_path, on_nan="rollback", **options)
    trainer.fit(poisoned(range(17, 18), 100), steps=40)
    assert trainer.step == 40
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    state = json.loads((tmp_path / "checkpoints/40/state.json").read_text())
    assert (state["rollbacks"], state["skipped_batches"]) == (1, 10)  # batches 10 to 19


@pytest.mark.medium
def test_rollbacks_are_limited(tmp_path):
    trainer = make_trainer(
        compiled(),
        tmp_path,
        steps_per_loop=5,
        checkpoint_every=10,
        on_nan="rollback",
        max_rollbacks=2,
    )
    with pytest.raises(UserError, match="2 rollbacks did not help"):
        trainer.fit(poisoned(range(12, 100), 100), steps=60)


@pytest.mark.medium
def test_metrics_jsonl_is_one_object_a_line(tmp_path):
    trainer = make_trainer(compiled(), tmp_path, log_every=5)
    trainer.fit(data(), steps=20, validation_data=data(), eval_every=10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["split"]) for r in lines] == [
        (5, "train"),
        (10, "train"),
        (10, "eval"),
        (15, "train"),
        (20, "train"),
        (20, "eval"),
    ]
    assert all(math.isfinite(r["loss"]) for r in lines)
    assert {"accuracy", "grad_norm", "learning_rate", "time"} <= set(lines[0])
