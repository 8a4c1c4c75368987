"""Models and data that a trainer has not seen before are checked before anything is trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp
from tests.support.models.training import compiled, data, examples, make_trainer
from tftpu.errors import UserError

X, Y = examples(32)
ONE_HOT = np.eye(4, dtype=np.float32)[Y]


# Features without labels


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"metrics": []}], ids=["metrics", "a loss only"])
def test_a_new_trainer_predicts_for_features_alone(options):
    model = compiled(**options)
    trainer = make_trainer(model)
    np.testing.assert_allclose(trainer.predict(X, batch_size=20), model(X), atol=1e-6)
    batches = tf.data.Dataset.from_tensor_slices(X).batch(20)
    np.testing.assert_allclose(trainer.predict(batches), model(X), atol=1e-6)
    trainer.fit(X, Y)  # the same trainer trains and evaluates afterwards
    np.testing.assert_allclose(trainer.predict(X), model(X), atol=1e-6)
    assert trainer.step == 1 and trainer.evaluate(X, Y, return_dict=True)["loss"] > 0


def test_a_new_trainer_builds_the_model_to_predict():
    model = compiled(keras.Sequential([keras.layers.Dense(4)]))
    assert make_trainer(model).predict(X).shape == (32, 4)


@pytest.mark.slow
def test_a_new_process_restores_for_arrays_alone(tmp_path):
    options = {"ema_momentum": 0.5}
    earlier = make_trainer(compiled(), str(tmp_path), **options)
    earlier.fit(X, Y, epochs=3, batch_size=16, verbose=0)
    later = make_trainer(compiled(), str(tmp_path), **options)
    assert later.restore_for_evaluation(X).step == later.step == 6
    np.testing.assert_array_equal(later.predict(X), earlier.predict(X))
    # The weights' averages are still those of the checkpoint once labels are there.
    assert later.evaluate(X, Y, return_dict=True) == earlier.evaluate(X, Y, return_dict=True)
    assert later.step == 6


@pytest.mark.parametrize("options", [{}, {"metrics": []}], ids=["metrics", "a loss only"])
def test_missing_labels_are_named(options):
    trainer = make_trainer(compiled(**options))
    features = tf.data.Dataset.from_tensor_slices(X).batch(8)
    for call in (
        lambda: trainer.fit(X),
        lambda: trainer.fit(features),
        lambda: trainer.evaluate(X, return_dict=True),
        lambda: trainer.fit(X, Y, validation_data=features),
    ):
        with pytest.raises(UserError, match="need labels, but the data has none: pass x and y"):
            call()
    assert trainer.step == 0


# Batches that do not fit the model


def test_a_batch_of_four_parts_names_what_a_compiled_model_takes():
    four = tf.data.Dataset.from_tensor_slices((X, Y, Y, Y)).batch(8)
    for method in ("fit", "evaluate", "predict"):
        with pytest.raises(UserError, match=r"has 4 parts: a compiled model takes \(x, y\) or"):
            getattr(make_trainer(compiled()), method)(four)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            (X[:, :4], Y),
            r"takes features of shape \(6,\) for each example, but the data has \(4,\)",
        ),
        ((X, ONE_HOT), r"Keras cannot evaluate the model with batches of x \(32, 6\), y \(32, 4\)"),
        ((X, Y + 3), "has the value 6 in the examples .* the model's output has 4 classes"),
    ],
    ids=["features", "labels", "classes"],
)
def test_validation_data_of_another_shape_fail_before_a_step_is_trained(wrong, sentence):
    trainer = make_trainer(compiled())
    with pytest.raises(UserError, match=sentence):
        trainer.fit(X, Y, epochs=2, validation_data=wrong)
    assert trainer.step == 0
    with pytest.raises(UserError, match=sentence):
        trainer.evaluate(*wrong, return_dict=True)


# The model


def test_a_misspelled_loss_or_metric_is_named():
    for options, sentence in (
        ({"loss": "crossentropi"}, "with the loss 'crossentropi'"),
        ({"loss": "binary_crossentropi"}, "Did you mean 'binary_crossentropy'"),
        ({"metrics": ["acuracy_"]}, "with the metric 'acuracy_'"),
        ({"metrics": ["acuracy"]}, "Did you mean 'accuracy'"),
    ):
        with pytest.raises(UserError, match=sentence) as caught:
            make_trainer(compiled(**options)).fit(X, Y)
        assert "data" not in str(caught.value)


def freeze(model: keras.Model) -> None:
    model.layers[0].trainable = False


@pytest.mark.medium
@pytest.mark.parametrize("change", [compiled, freeze], ids=["compiled", "frozen"])
def test_a_model_that_was_changed_needs_a_new_trainer(change):
    model = mlp()
    trainer = make_trainer(compiled(model))
    trainer.fit(X, Y)
    change(model)
    for call in (
        lambda: trainer.fit(X, Y, epochs=2),
        lambda: trainer.evaluate(X, Y, return_dict=True),
        lambda: trainer.predict(X),
    ):
        with pytest.raises(UserError, match=r"make a new Trainer\(model"):
            call()
    again = make_trainer(compiled(model))
    again.fit(X, Y)
    assert again.step == 1


@pytest.mark.medium
def test_a_loss_that_has_no_module_trains():
    made: dict = {"keras": keras}
    exec("def loss(y, p): return keras.ops.mean(keras.ops.square(y - p), -1)", made)
    made["loss"].__module__ = None
    model = compiled(loss=made["loss"], metrics=[])
    assert make_trainer(model).fit(X, ONE_HOT).history["loss"]


# Loss functions


def pair_loss(model, batch, training):
    x, more = batch
    return keras.ops.mean(keras.ops.square(model(x) - more), -1)


@pytest.mark.slow
def test_arrays_in_a_list_reach_a_loss_function_as_a_data_set_gives_them():
    losses = []
    pairs = tf.data.Dataset.from_tensor_slices((X, ONE_HOT)).batch(8)
    for given, batch_size in (([X, ONE_HOT], 8), (pairs, None)):
        model = mlp()
        model.compile("sgd")
        trainer = tftpu.Trainer(model, loss_fn=pair_loss)
        history = trainer.fit(given, batch_size=batch_size, shuffle=False, verbose=0).history
        losses.append(
            (
                history["loss"],
                trainer.evaluate(given, batch_size=batch_size, return_dict=True)["loss"],
            )
        )
    assert losses[0] == losses[1]


@pytest.mark.medium
def test_weights_that_a_loss_function_cannot_know_are_refused_or_announced():
    model = mlp()
    model.compile("sgd")
    trainer = tftpu.Trainer(model, loss_fn=lambda model, batch, training: model(batch[0])[:, 0])
    with pytest.raises(UserError, match="class_weight works only with a compiled loss"):
        trainer.fit(X, Y, class_weight={0: 2.0})
    with pytest.warns(UserWarning, match=r"to the loss function as batch\[2\]"):
        trainer.fit(X, Y, sample_weight=np.ones(32, np.float32))


@pytest.mark.medium
def test_the_data_of_a_run_that_goes_on_are_named(caplog):
    trainer = make_trainer(compiled())
    trainer.fit(data(), steps=2, verbose=0)
    assert not caplog.records
    trainer.fit(data(), steps=2, verbose=0)
    assert "already has 2 steps, and no more are requested: nothing is left to train" in caplog.text
    assert "more than 2 steps continue this run: --config.train.steps=N, " in caplog.text
    assert "--config.train.epochs=N or fit(steps=N)" in caplog.text


@pytest.mark.medium
def test_averages_of_weights_begin_with_weights_that_were_loaded_later():
    x, y = examples(32)

    def begin():
        model = compiled()
        return model, make_trainer(model, ema_momentum=0.5)

    def load(model):
        model.set_weights([np.full(weight.shape, 0.5) for weight in model.get_weights()])

    given, expected = begin()
    load(given)
    theirs = expected.evaluate(x, y)
    late, trainer = begin()
    trainer.evaluate(x, y)
    load(late)
    assert trainer.evaluate(x, y) == theirs
    np.testing.assert_array_equal(trainer.predict(x), expected.predict(x))
    _, third = begin()
    loads = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: load(third.model))
    averages = []
    for one in (expected, trainer, third):
        one.fit(x, y, 16, shuffle=False, callbacks=[loads] if one is third else [], verbose=0)
        averages.append([*one.executor.averaged_weights().values()])
    for ours in averages[1:]:
        for average, other in zip(ours, averages[0]):
            np.testing.assert_array_equal(average, other)
