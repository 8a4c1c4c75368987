"""Unsupported models, data and options fail before training, with the reason."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp
from tests.support.models.training import compiled, data, examples, make_trainer
from tftpu.engines.data import batches
from tftpu.errors import UserError


class OwnMetric(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(4)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        self.norm.update_state(keras.ops.norm(x))
        return self.out(x)


class WholeNumber(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(4)
        self.shift = self.add_weight((4,), dtype="int32", name="shift")

    def call(self, x):
        return self.out(x) + keras.ops.cast(self.shift, "float32")


class OwnTrainStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class Doubling(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2 * grad, v) for grad, v in grads_and_vars])


def stateful() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6, 1), batch_size=16),
            keras.layers.LSTM(4, stateful=True, name="memory"),
            keras.layers.Dense(4),
        ]
    )


def frozen() -> keras.Model:
    model = mlp()
    model.trainable = False
    return compiled(model)


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
    "a whole number": (lambda: compiled(WholeNumber()), data, "shift' is trainable, but of"),
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
}


# What only a model's own steps can train: with whole batches on each device.
UNDIVIDED = {
    "train_step": (
        lambda: compiled(OwnTrainStep([keras.Input((6,)), keras.layers.Dense(4)])),
        "overrides train_step",
    ),
    "run_eagerly": (lambda: compiled(run_eagerly=True), "run_eagerly"),
    "accumulation": (
        lambda: compiled(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
        r"TrainConfig\(gradient_accumulation_steps=N\)",
    ),
    "ema": (
        lambda: compiled(optimizer=keras.optimizers.SGD(use_ema=True)),
        r"TrainConfig\(ema_momentum=",
    ),
    "nadam": (lambda: compiled(optimizer="nadam"), "Nadam"),
    "own apply_gradients": (
        lambda: compiled(optimizer=Doubling()),
        "Doubling changes variables outside of its update_step",
    ),
    "a stateful layer": (lambda: compiled(stateful()), "The layer 'memory' is stateful"),
    "nothing to train": (frozen, "has no trainable variables"),
    "an internal metric": (lambda: compiled(OwnMetric()), "itself updates the metric 'norm'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", UNDIVIDED)
def test_what_cannot_be_divided_trains_whole_or_is_refused_on_several_devices(case, count):
    make, sentence = UNDIVIDED[case]
    keras.utils.set_random_seed(1)
    theirs = make()
    with tftpu.connect(virtual_devices=count).scope():
        keras.utils.set_random_seed(1)
        ours = make()
    ours.set_weights(theirs.get_weights())
    if count > 1 and case in {"train_step", "accumulation"}:
        with pytest.raises(UserError, match=rf"(?s){sentence}.*JAX engine.*loss_fn"):
            make_trainer(ours).fit(data(), steps=4)
        return
    said = rf"{sentence}.*each of the 2 devices computes the whole batch"
    with pytest.warns(match=said) if count > 1 else contextlib.nullcontext():
        found = make_trainer(ours).fit(data(), epochs=2, verbose=0).history
    expected = theirs.fit(data(), epochs=2, verbose=0).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_and_data_fail_before_training(case):
    make, dataset, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        make_trainer(make()).fit(dataset(), steps=4)


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
def test_an_option_out_of_range_fails_with_its_name(option, value):
    with pytest.raises(UserError, match=rf"train\.{option} is {value!r}"):
        make_trainer(compiled(), **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps_per_loop", 2.5), ("keep", "3"), ("keep", 2.5), ("seed", "a"), ("writers", "wandb")],
)
def test_an_option_of_another_type_fails_with_its_name(option, value):
    with pytest.raises(UserError, match=rf"train\.{option} is {value!r}: its type must be "):
        tftpu.Trainer(compiled(), None, tftpu.TrainConfig(**{option: value}))


def test_options_as_a_dict_fail():
    with pytest.raises(UserError, match=r"options is dict .*pass tftpu\.TrainConfig\("):
        tftpu.Trainer(compiled(), None, {"keep": 3})


@pytest.mark.parametrize(
    ("workdir", "words"),
    [
        ("s3://bucket/run", "not a folder that tftpu can use: give a local one, or gs://"),
        ("hdfs://host/run", "not a folder that tftpu can use"),
        ("gs://", "not a folder that tftpu can use"),
        ("a\0b", "not a folder that tftpu can use"),
        ("x" * 256, "too long: give a shorter name"),
        ("x/" * 2000, "too long: give a shorter name"),
        (f"gs://bucket/{'x' * 1000}", "too long: give a shorter name"),
    ],
)
def test_a_workdir_that_cannot_be_locked_or_named_fails_before_training(workdir, words):
    with pytest.raises(UserError, match=words):
        tftpu.Trainer(compiled(mlp()), workdir)


@pytest.mark.parametrize("workdir", [object(), 3, b"run"])
def test_a_workdir_that_is_no_path_fails(workdir):
    """The text of an engine in its place would name a folder that no later run finds."""
    with pytest.raises(UserError, match=r"The workdir is a \w+: give the path of a folder"):
        tftpu.Trainer(compiled(mlp()), workdir)


def test_invalid_steps_and_times_fail():
    with pytest.raises(UserError, match=r"steps is 2\.5"):
        make_trainer(compiled()).fit(data(), steps=2.5)
    with pytest.raises(UserError, match="watchdog_seconds is 0"):
        make_trainer(compiled(), watchdog_seconds=0)
    with pytest.raises(UserError, match="eval_every is -5"):
        make_trainer(compiled()).fit(data(), steps=4, validation_data=data(), eval_every=-5)


def test_invalid_validation_data_fails_before_a_step_is_trained():
    for wrong, sentence in (
        (examples()[0], "features without labels"),
        (data().repeat(), "never end"),
    ):
        trainer = make_trainer(compiled())
        with pytest.raises(UserError, match=sentence):
            trainer.fit(data(), steps=4, validation_data=wrong)
        assert trainer.step == 0


def test_an_unknown_best_metric_fails_before_a_step_is_trained():
    trainer = make_trainer(compiled(), best_metric="acuracy")
    with pytest.raises(
        UserError,
        match=r"'acuracy', but the evaluation has no such metric\. Did you mean 'accuracy'",
    ):
        trainer.fit(data(), steps=4, validation_data=data())
    assert trainer.step == 0


def test_endless_evaluation_data_fails():
    with pytest.raises(UserError, match="never end"):
        make_trainer(compiled()).evaluate(data().repeat(), return_dict=True)


def generated(parts, until=lambda: False) -> tf.data.Dataset:
    """Returns a data set without a known length, which repeats a batch until something is so."""

    def batches():
        while not until():
            yield parts

    spec = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in parts)
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def test_counting_the_batches_of_data_without_an_end_is_told_and_ends(monkeypatch, caplog):
    monkeypatch.setattr(batches, "_LONG", 0.1)
    monkeypatch.setattr(batches, "_LONGEST", 0.6)
    with pytest.raises(
        UserError, match=r"did not end after .* and 0 minutes.*pass steps_per_epoch="
    ):
        make_trainer(compiled()).fit(generated(examples(8)), epochs=2)
    assert "does not say how many batches it has" in caplog.text
    assert "Counting its batches is given up after 0 minutes." in caplog.text


@pytest.mark.medium
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluation_and_prediction_data_that_may_have_no_end_are_told(method, monkeypatch, caplog):
    monkeypatch.setattr(batches, "_LONG", 0.1)
    said = "If it never ends, pass steps="
    endless = generated(examples(8), until=lambda: said in caplog.text)
    getattr(make_trainer(compiled()), method)(endless)
    assert said in caplog.text


@pytest.mark.medium
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_data_that_ended_once_are_not_told_of_again(method, monkeypatch, caplog):
    monkeypatch.setattr(batches, "_LONG", 0.0)
    ending = data().filter(lambda *_: True)  # of unknown length
    trainer, said = make_trainer(compiled()), []
    for _ in range(2):
        getattr(trainer, method)(ending)
        said.append(caplog.text.count("has not ended yet"))
    assert said[0] == said[1] > 0


@pytest.mark.parametrize("static", [True, False])
def test_parts_of_a_batch_of_different_sizes_are_named(static):
    (x, y), (more, _) = examples(64), examples(192)
    unequal = generated((x, more, y)).map(lambda x, more, y: ({"x": x, "more": more}, y))
    if static:
        unequal = tf.data.Dataset.from_tensors(({"x": x, "more": more}, y)).repeat()
    with pytest.raises(UserError, match=r"arrays of 64, 192 examples, but all must hold"):
        make_trainer(compiled()).fit(unequal, steps=2)


@pytest.mark.medium
def test_growing_evaluation_batches_are_evaluated_as_in_keras():
    x, y = examples()

    def growing():
        yield x[:4], y[:4]
        yield x[:8], y[:8]

    spec = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y))
    batches = tf.data.Dataset.from_generator(growing, output_signature=spec)
    expected = compiled().evaluate(batches, verbose=0, return_dict=True)
    found = make_trainer(compiled()).evaluate(batches, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_length_that_only_the_options_give_is_an_argument_of_fit():
    x, y = np.zeros((16, 8), "float32"), np.zeros(16, "int32")
    trainer = tftpu.Trainer(compiled(), None, tftpu.TrainConfig(epochs=3))
    with pytest.raises(UserError, match=r"say epochs=3, but a Trainer takes the length"):
        trainer.fit(x, y)
