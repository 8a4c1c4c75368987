"""`Trainer` on models and data as users bring them."""

import csv
import json
import math
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.strategies import mlp, random_batches, relative
from tests.support.training import make_trainer
from tftpu.config import OPTIMIZERS, Optimizer
from tftpu.errors import UserError
from tftpu.optim import optimizers

STEPS = 12


def examples(count: int = 96):
    ((x, _, _),) = random_batches(1, count, False)
    return x, (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] > 0)


def data(batch: int = 16, count: int = 96) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples(count)).batch(batch)


def compiled(model: keras.Model | None = None, **options) -> keras.Model:
    model = model or mlp()
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options.setdefault("metrics", ["accuracy"])
    model.compile(options.pop("optimizer", "sgd"), **options)
    return model


def trainer_of(model: keras.Model, workdir=None, **options) -> tftpu.Trainer:
    return make_trainer(model, workdir, **options)


def test_fit_equals_keras_fit_on_one_device():
    """Keras's own trainer, on the same batches in the same order, is the independent one."""
    ours, theirs = compiled(), compiled()
    batches = data().repeat(2)
    history = trainer_of(ours).fit(batches, STEPS, validation_data=data(), eval_every=6)
    theirs_history = theirs.fit(data(), epochs=2, validation_data=data(), verbose=0)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 1e-5
    for name, values in theirs_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_keras_fit_on_four_replicas(name):
    config = Optimizer(name, learning_rate=0.02, warmup_steps=2, weight_decay=0.05)
    with tftpu.connect(virtual_devices=4).scope():
        ours = compiled(optimizer=optimizers.build(config, 16, STEPS))
    theirs = compiled(optimizer=optimizers.build(config, 16, STEPS))
    trainer_of(ours).fit(data(), STEPS)
    theirs.fit(data().repeat(2), verbose=0)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 2e-5


def test_sample_weights_mean_what_they_mean_in_keras():
    x, y = examples()
    w = np.random.default_rng(2).uniform(0.1, 3.0, len(y)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, y, w)).batch(16)
    results = []
    for count in (1, 4):
        with tftpu.connect(virtual_devices=count).scope():
            model = compiled(weighted_metrics=["accuracy"])
        trainer_of(model).fit(batches, 6)
        results.append(model.get_weights())
    theirs = compiled()
    theirs.fit(batches, verbose=0)
    for one, four, keras_own in zip(*results, theirs.get_weights()):
        assert relative(one, keras_own) < 1e-5
        assert relative(four, keras_own) < 1e-5


@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weights_mean_what_they_mean_in_keras(one_hot):
    batches = data()
    options = {}
    if one_hot:
        batches = batches.map(lambda x, y: (x, tf.one_hot(y, 4)))
        options["loss"] = keras.losses.CategoricalCrossentropy(from_logits=True)
    ours, theirs = compiled(**options), compiled(**options)
    weights = {0: 0.5, 1: 2.0, 3: 4.0}
    trainer_of(ours).fit(batches, 6, class_weight=weights)
    theirs.fit(batches, verbose=0, class_weight=weights)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        assert relative(a, e) < 1e-5


def test_the_step_is_traced_once_over_a_whole_fit_with_evaluation():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, x, training=False):
            traces.append(training)
            return x

    layers = [keras.Input((6,)), Counting(), keras.layers.Dense(4)]
    model = compiled(keras.Sequential(layers))
    trainer = trainer_of(model, steps_per_loop=4)
    traces.clear()
    trainer.fit(data(), 10, validation_data=data(batch=20), eval_every=5)
    # Keras builds the model, the step looks it over; then one trace to train, one to evaluate.
    assert traces == [False, True, True, False]
    trainer.fit(data(), 20, validation_data=data(batch=20))
    assert len(traces) == 4


@pytest.mark.parametrize("count", [1, 8])
def test_evaluation_counts_every_example_once(count):
    with tftpu.connect(virtual_devices=count).scope():
        model = compiled()
    odd = data(batch=64, count=77)  # 64 + 13, and 13 is no multiple of 8
    expected = compiled().evaluate(odd, verbose=0, return_dict=True)
    assert trainer_of(model).evaluate(odd) == pytest.approx(expected, rel=1e-6)


def test_the_digits_give_the_same_accuracy_on_eight_replicas_as_keras_on_one_device():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    everything = tf.data.Dataset.from_tensor_slices((x, digits.target)).batch(64)
    with tftpu.connect(virtual_devices=8).scope():
        model = compiled(mlp(64, 10), optimizer=keras.optimizers.Adam(0.01))
    trainer_of(model).fit(everything, 40)
    one = compiled(mlp(64, 10))
    one.set_weights(model.get_weights())
    expected = one.evaluate(everything, verbose=0, return_dict=True)
    results = trainer_of(model).evaluate(everything)
    assert round(results["accuracy"] * 1797) == round(expected["accuracy"] * 1797)
    assert 0.3 < results["accuracy"] < 1.0
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_predict_gives_every_example_in_order(count):
    with tftpu.connect(virtual_devices=count).scope():
        model = compiled()
    outputs = trainer_of(model).predict(data(batch=20, count=77))
    np.testing.assert_allclose(outputs, mlp()(examples(77)[0]).numpy(), rtol=1e-5, atol=1e-6)


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

    trainer_of(model, steps_per_loop=1).fit(numbered, 8, callbacks=[Record()])
    stream = np.tile(np.arange(77), 3)[: 8 * 20].reshape(8, 20).sum(1)
    np.testing.assert_allclose(seen, stream)


def test_ema_is_what_evaluation_uses():
    model = compiled()
    trainer = trainer_of(model, ema_momentum=0.8)
    trainer.fit(data(), STEPS)
    averaged = compiled()
    averaged.set_weights([v.numpy() for v in trainer.executor.variables.averages])
    expected = averaged.evaluate(data(), verbose=0, return_dict=True)
    live = model.evaluate(data(), verbose=0, return_dict=True)
    assert trainer.evaluate(data()) == pytest.approx(expected, rel=1e-5)
    assert abs(live["loss"] - expected["loss"]) > 1e-3


# What users bring


def several_inputs_and_outputs() -> tuple[keras.Model, tf.data.Dataset]:
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    both = keras.layers.Concatenate()([left, right])
    kind = keras.layers.Dense(4, name="kind")(both)
    size = keras.layers.Dense(1, name="size")(both)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    model.compile(
        "sgd",
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = examples()
    features = {"left": x, "right": x[::-1].copy()}
    labels = {"kind": y, "size": x[:, :1]}
    return model, tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)


def subclassed_with_added_loss() -> tuple[keras.Model, tf.data.Dataset]:
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01))
            self.out = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.02))

        def call(self, x):
            h = self.hidden(x)
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(h)))
            return self.out(h)

    return compiled(Own()), data()


def frozen_layers() -> tuple[keras.Model, tf.data.Dataset]:
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model), data()


def masked_sequences() -> tuple[keras.Model, tf.data.Dataset]:
    tokens = np.random.default_rng(0).integers(1, 9, (96, 7))
    for row, length in enumerate(np.random.default_rng(1).integers(1, 8, 96)):
        tokens[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(10, 5, mask_zero=True),
            keras.layers.Dense(4),
        ]
    )
    return compiled(model), tf.data.Dataset.from_tensor_slices(
        (tokens.astype(np.int32), tokens % 4)
    ).batch(16)


def an_application() -> tuple[keras.Model, tf.data.Dataset]:
    """Without its dropout, which draws other masks in Keras than here."""
    model = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3), weights=None, classes=4, dropout_rate=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy()
    images = np.random.default_rng(0).uniform(0, 255, (16, 32, 32, 3)).astype(np.float32)
    labels = np.arange(16) % 4
    return compiled(model, loss=loss), tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)


def from_keras_hub() -> tuple[keras.Model, tf.data.Dataset]:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(
        backbone=backbone, num_classes=4, preprocessor=None, dropout=0.0
    )
    tokens = np.random.default_rng(0).integers(0, 30, (96, 6)).astype(np.int32)
    features = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }
    batches = tf.data.Dataset.from_tensor_slices((features, tokens[:, 0] % 4)).batch(16)
    return compiled(model), batches


@pytest.mark.parametrize(
    "bring",
    [
        several_inputs_and_outputs,
        subclassed_with_added_loss,
        frozen_layers,
        masked_sequences,
        an_application,
        from_keras_hub,
    ],
)
def test_what_users_bring_trains_as_in_keras_and_the_same_on_four_replicas(bring):
    steps = 2
    keras.utils.set_random_seed(0)
    theirs, batches = bring()
    theirs(next(iter(batches))[0])
    start = theirs.get_weights()
    theirs_history = theirs.fit(batches.take(steps), verbose=0).history
    for count in (1, 4):
        if bring is an_application and count == 4:
            continue  # its batch normalisation is Keras's, per replica by definition
        with tftpu.connect(virtual_devices=count).scope():
            ours, _ = bring()
            ours(next(iter(batches))[0])
            ours.set_weights(start)
        history = trainer_of(ours).fit(batches, steps).history
        for a, e, s in zip(ours.get_weights(), theirs.get_weights(), start):
            # Weights that should not move at all (a bias before a norm) move by rounding alone.
            assert relative(a, e) < 2e-5 or np.abs(a - s).max() < 1e-7
        for name, values in theirs_history.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


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
    history = trainer_of(model).fit(
        data(), 18, validation_data=data(), eval_every=6, callbacks=callbacks
    )
    assert calls[0] == "begin" and calls[-1] == "end" and len(calls) == 5
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"} <= set(calls[1][1])
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(r["loss"]) for r in rows] == pytest.approx(history.history["loss"])
    assert history.epoch == [0, 1, 2]
    saved = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_allclose(saved.get_weights()[0], model.get_weights()[0])
    assert any((tmp_path / "board").rglob("events*"))


def test_early_stopping_and_reduce_on_plateau_act():
    model = compiled(optimizer=keras.optimizers.SGD(0.0))  # learns nothing: a plateau
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
    reduce = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1e-3)
    history = trainer_of(model).fit(
        data(), 100, validation_data=data(), eval_every=6, callbacks=[stop, reduce]
    )
    assert len(history.epoch) == 4


# What is refused


class OwnMetric(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(4)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        self.norm.update_state(keras.ops.norm(x))
        return self.out(x)


class OwnTrainStep(keras.Sequential):
    def train_step(self, data):
        return {}


def with_layer(layer) -> keras.Model:
    return keras.Sequential(
        [keras.Input((8, 8, 3)), layer, keras.layers.Flatten(), keras.layers.Dense(4)]
    )


def images(dtype=np.float32) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        (np.zeros((16, 8, 8, 3), dtype), np.zeros(16, int))
    ).batch(8)


REFUSED = {
    "not compiled": (mlp, data, "call model.compile"),
    "train_step": (
        lambda: compiled(OwnTrainStep([keras.Input((6,)), keras.layers.Dense(4)])),
        data,
        "overrides train_step",
    ),
    "run_eagerly": (lambda: compiled(run_eagerly=True), data, "run_eagerly"),
    "accumulation": (
        lambda: compiled(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
        data,
        r"TrainOptions\(gradient_accumulation_steps=N\)",
    ),
    "ema": (
        lambda: compiled(optimizer=keras.optimizers.SGD(use_ema=True)),
        data,
        r"TrainOptions\(ema_momentum=",
    ),
    "nadam": (lambda: compiled(optimizer="nadam"), data, "Nadam"),
    "scalar loss": (
        lambda: compiled(loss=lambda y, p: keras.ops.mean(p)),
        data,
        "one number for the whole batch",
    ),
    "a metric of its own": (lambda: compiled(OwnMetric()), data, "the metric 'norm' within itself"),
    "scalar metric": (
        lambda: compiled(metrics=[lambda y, p: keras.ops.mean(p)]),
        data,
        "returns one number for the whole batch",
    ),
    "numpy": (compiled, lambda: examples(), "pass a tf.data.Dataset"),
    "not batched": (compiled, lambda: data().unbatch(), "add .batch"),
    "empty": (compiled, lambda: data().take(0), "is empty"),
    "strings": (
        compiled,
        lambda: tf.data.Dataset.from_tensor_slices((["a"] * 8, [0] * 8)).batch(4),
        "string",
    ),
    "ragged": (
        compiled,
        lambda: tf.data.Dataset.from_tensor_slices(
            (tf.ragged.constant([[1.0], [2.0, 3.0]] * 4), [0] * 8)
        ).batch(4),
        "RaggedTensor",
    ),
    "dynamic shape": (
        lambda: compiled(keras.Sequential([keras.Input((None, 6)), keras.layers.Dense(4)])),
        lambda: tf.data.Dataset.from_generator(
            lambda: iter([(np.zeros((3, 6)), 0)] * 8),
            output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((), tf.int32)),
        ).batch(4),
        "static shapes only",
    ),
    "host op": (
        lambda: compiled(with_layer(keras.layers.RandomRotation(0.1, name="augment"))),
        images,
        "The layer 'augment' uses the op ImageProjectiveTransformV3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_before_training(case):
    make, dataset, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        trainer_of(make()).fit(dataset(), 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gradient_accumulation_steps", 0),
        ("global_clipnorm", -1.0),
        ("ema_momentum", 1.5),
        ("on_nan", "pray"),
        ("keep", 0),
    ],
)
def test_an_option_out_of_range_is_refused(option, value):
    with pytest.raises(UserError, match=rf"train\.{option} is {value!r}"):
        trainer_of(compiled(), **{option: value})


def test_a_run_that_a_callback_ends_logs_its_last_steps(tmp_path):
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100)
    trainer_of(compiled(), tmp_path).fit(data(), 24, eval_every=6, callbacks=[stop])
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert (line["step"], line["split"]) == (12, "train")


def test_times_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match=r"steps is 2\.5"):
        trainer_of(compiled()).fit(data(), 2.5)
    with pytest.raises(UserError, match="watchdog is 0"):
        trainer_of(compiled(), watchdog_seconds=0)
    with pytest.raises(UserError, match="eval_every is -5"):
        trainer_of(compiled()).fit(data(), 4, validation_data=data(), eval_every=-5)


def test_validation_data_that_cannot_be_used_are_refused_before_a_step_is_trained():
    for wrong, sentence in ((examples(), "The data is a tuple"), (data().repeat(), "never end")):
        trainer = trainer_of(compiled())
        with pytest.raises(UserError, match=sentence):
            trainer.fit(data(), 4, validation_data=wrong)
        assert trainer.step is None


def test_a_best_metric_that_no_evaluation_has_is_refused_before_a_step_is_trained():
    trainer = trainer_of(compiled(), best_metric="acuracy")
    with pytest.raises(UserError, match=r"no 'acuracy' for best_metric\. Did you mean 'accuracy'"):
        trainer.fit(data(), 4, validation_data=data())
    assert trainer.step == 0


def test_a_callback_that_fails_at_the_end_leaves_nothing_running(tmp_path):
    class Failing(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer_of(compiled(), tmp_path).fit(data(), 4, callbacks=[Failing()])
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}
    assert json.loads((tmp_path / "goodput.json").read_text())["state"] == "finished"


def test_evaluation_data_that_never_end_are_refused():
    with pytest.raises(UserError, match="never end"):
        trainer_of(compiled()).evaluate(data().repeat())


def test_evaluation_batches_that_grow_are_said():
    x, y = examples()

    def growing():
        yield x[:4], y[:4]
        yield x[:8], y[:8]

    spec = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y))
    batches = tf.data.Dataset.from_generator(growing, output_signature=spec)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"larger than the first one.*rebatch"):
        trainer_of(compiled()).evaluate(batches)


def test_a_batch_that_the_replicas_do_not_divide_is_refused():
    with tftpu.connect(virtual_devices=8).scope():
        model = compiled()
    with pytest.raises(UserError, match="use a multiple of 8, as 8 or 16"):
        trainer_of(model).fit(data(batch=12), 4)


# A loss that is not finite


def poisoned(bad: range, steps: int = 40) -> tf.data.Dataset:
    x, y = examples()
    x, y = np.tile(x[:16], (steps, 1, 1)), np.tile(y[:16], (steps, 1))
    for step in bad:
        x[step] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, y))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    trainer = trainer_of(compiled(), tmp_path, steps_per_loop=5, checkpoint_every=10)
    with pytest.raises(
        UserError, match=r"between step 16 and step 20 \(last finite: loss .*step 10"
    ):
        trainer.fit(poisoned(range(17, 18)), 40)
    assert trainer.checkpoints.steps() == [10]
    again = trainer_of(compiled(), tmp_path)
    assert again.fit(poisoned(range(0)), 40).epoch == [0]
    assert all(np.isfinite(w).all() for w in again.model.get_weights())


def test_rollback_skips_the_bad_batches(tmp_path):
    options = {"steps_per_loop": 5, "log_every": 10, "checkpoint_every": 10}
    trainer = trainer_of(compiled(), tmp_path, on_nan="rollback", **options)
    trainer.fit(poisoned(range(17, 18), 100), 40)
    assert trainer.step == 40
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    state = json.loads((tmp_path / "checkpoints/40/state.json").read_text())
    assert (state["rollbacks"], state["skipped_batches"]) == (1, 10)  # batches 10 to 19


def test_rollbacks_come_to_an_end(tmp_path):
    trainer = trainer_of(
        compiled(),
        tmp_path,
        steps_per_loop=5,
        checkpoint_every=10,
        on_nan="rollback",
        max_rollbacks=2,
    )
    with pytest.raises(UserError, match="2 rollbacks did not help"):
        trainer.fit(poisoned(range(12, 100), 100), 60)


def test_metrics_jsonl_is_one_object_a_line(tmp_path):
    trainer = trainer_of(compiled(), tmp_path, log_every=5)
    trainer.fit(data(), 20, validation_data=data(), eval_every=10)
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
