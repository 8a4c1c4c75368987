"""Batches of Python iterables, and what only a model's own steps can do, against Keras."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tftpu
from tests.support.models.training import make_trainer
from tftpu.errors import UserError

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def build(metrics=(), kind=keras.Sequential, **compiled) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = kind([keras.Input((6,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = {"optimizer": keras.optimizers.SGD(0.1), "loss": loss, "metrics": list(metrics)}
    model.compile(**given | compiled)
    return model


def on_devices(count: int) -> keras.Model:
    with tftpu.connect(virtual_devices=count).scope():
        return build()


class Batches:
    """An iterable that is none of Keras's, with passes of given lengths."""

    def __init__(self, *lengths: int):
        self._lengths = list(lengths)

    def __iter__(self):
        length = self._lengths.pop(0) if self._lengths else 5
        for first in range(0, 8 * length, 8):
            yield X[first : first + 8], Y[first : first + 8]


def known() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


class Largest(keras.metrics.Metric):
    """A state that cannot be added up."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2])
def test_labels_are_weighed_where_the_number_of_batches_is_unknown(count):
    arguments = {"steps_per_epoch": 5, "class_weight": {0: 0.0, 1: 10.0}, "verbose": 0}
    unknown = known().filter(lambda x, y: True)
    found = make_trainer(on_devices(count)).fit(unknown, **arguments).history["loss"]
    assert found == pytest.approx(build().fit(unknown, **arguments).history["loss"], rel=1e-5)


@pytest.mark.medium
def test_a_metric_that_is_no_sum_is_found_in_the_first_batch():
    trainer = make_trainer(build([Largest()]))
    theirs = build([Largest()])
    expected = theirs.fit(known(), epochs=2, verbose=0).history
    found = trainer.fit(Batches(), epochs=2, validation_data=(X, Y), verbose=0).history
    assert found["largest"] == pytest.approx(expected["largest"], rel=1e-5)
    assert trainer.evaluate(Batches(), return_dict=True)["largest"] == pytest.approx(
        theirs.evaluate(known(), return_dict=True, verbose=0)["largest"], rel=1e-5
    )


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2])
def test_epochs_of_an_iterable_are_numbered_from_the_first_one(count):
    arguments = {"epochs": 4, "initial_epoch": 2, "verbose": 0}
    found = make_trainer(on_devices(count)).fit(Batches(), **arguments)
    expected = build().fit(known(), **arguments)
    assert found.epoch == expected.epoch == [2, 3]
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


@pytest.mark.parametrize(("lengths", "word"), [((5, 4), "fewer"), ((4, 5), "more")])
def test_passes_of_another_length_end_the_run(lengths, word):
    with pytest.raises(UserError, match=f"has {word} batches than the first, which had"):
        make_trainer(build()).fit(Batches(*lengths), epochs=3, verbose=0)


def draw(drawn):
    """Yields batches that differ, and records their numbers."""
    for number in range(100):
        drawn.append(number)
        first = number * 8 % 40
        yield X[first : first + 8] * (1 + number / 100), Y[first : first + 8]


def read_weights(trainer):
    return np.concatenate([np.ravel(value) for value in trainer.model.get_weights()])


@pytest.mark.medium
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
@pytest.mark.parametrize("placed", [True, False])
def test_a_generator_passed_again_is_read_on_where_it_is(placed, kind, tmp_path, capsys):
    """The numbers are those of one call, and of a run that was killed in the second one."""
    trainer = make_trainer(build(kind=kind), tmp_path / "one" if placed else None, steps_per_loop=2)
    drawn: list[int] = []
    batches = draw(drawn)
    trainer.fit(batches, steps=10, verbose=2)
    trainer.fit(batches, steps=15, verbose=2)
    assert trainer.step == 15 and drawn in (list(range(15)), list(range(16)))
    assert "thrown away" not in capsys.readouterr().out
    whole = make_trainer(build(kind=kind), steps_per_loop=2)
    whole.fit(draw([]), steps=15, verbose=0)
    np.testing.assert_array_equal(read_weights(trainer), read_weights(whole))
    if not placed:
        return
    first = make_trainer(build(kind=kind), tmp_path / "two", steps_per_loop=2)
    first.fit(draw([]), steps=12, verbose=0)
    later, again = make_trainer(build(kind=kind), tmp_path / "two", steps_per_loop=2), draw([])
    later.fit(again, steps=10, verbose=2)  # is complete
    later.fit(again, steps=15, verbose=2)
    assert "12 batches are read and thrown away" in capsys.readouterr().out
    np.testing.assert_array_equal(read_weights(later), read_weights(whole))


class BeginsAgain:
    """A loader as people write it: `iter` begins it again."""

    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        self.number += 1
        return X[:8] * self.number, Y[:8]


@pytest.mark.medium
def test_an_iterator_whose_iter_begins_again_is_read_on_as_well():
    trainer, whole, loader = make_trainer(build()), make_trainer(build()), BeginsAgain()
    trainer.fit(loader, steps=3, verbose=0)
    trainer.fit(loader, steps=6, verbose=0)
    whole.fit(BeginsAgain(), steps=6, verbose=0)
    np.testing.assert_array_equal(read_weights(trainer), read_weights(whole))


@pytest.mark.medium
def test_a_batch_that_was_read_for_a_refused_call_is_in_the_next_one():
    trainer, batches = make_trainer(build()), draw([])
    with pytest.raises(UserError, match="can be read only once"):
        trainer.fit(batches, epochs=2, steps_per_epoch=5, validation_data=draw([]), verbose=0)
    trainer.fit(batches, epochs=2, steps_per_epoch=5, verbose=0)
    trainer.fit(batches, epochs=1, steps_per_epoch=5, verbose=0)  # trains again, as in Keras
    theirs, given = build(), draw([])
    theirs.fit(given, epochs=3, steps_per_epoch=5, verbose=0)
    expected = np.concatenate([np.ravel(value) for value in theirs.get_weights()])
    np.testing.assert_allclose(read_weights(trainer), expected, rtol=1e-5)


@pytest.mark.medium
def test_a_validation_generator_that_ends_is_refused_before_training():
    trainer = make_trainer(build())
    with pytest.raises(UserError, match="can be read only once, but every epoch is evaluated"):
        trainer.fit(X, Y, epochs=2, validation_data=iter(Batches()))
    assert trainer.step == 0
    trainer.fit(X, Y, validation_data=iter(Batches()), verbose=0)


@pytest.mark.medium
def test_batches_of_any_sizes_train_on_replicas():
    def draw():
        for first, last in ((0, 5), (5, 10), (10, 12)):
            yield X[first:last], Y[first:last]

    found = make_trainer(on_devices(2)).fit(draw(), verbose=0).history["loss"]
    assert found == pytest.approx(build().fit(draw(), verbose=0).history["loss"], rel=1e-5)


@pytest.mark.medium
def test_an_iterable_validates_a_run_with_a_workdir(tmp_path):
    trainer = make_trainer(build(), tmp_path)
    history = trainer.fit(X, Y, epochs=2, validation_data=Batches(), verbose=0).history
    assert len(history["val_loss"]) == 2


@pytest.mark.medium
def test_sparse_features_after_dense_ones_and_their_steps_as_in_keras():
    trainer = make_trainer(build())
    trainer.fit(X, Y, verbose=0)
    sparse = scipy.sparse.csr_matrix(X)
    assert trainer.predict(sparse, steps=4).shape == (40, 2)
    np.testing.assert_allclose(trainer.predict(sparse), trainer.predict(X), atol=1e-6)
    with pytest.raises(UserError, match="30 and 40 examples"):
        trainer.fit(scipy.sparse.csr_matrix(X[:30]), Y)


def test_options_that_own_steps_cannot_follow_are_refused_whatever_came_before():
    trainer = make_trainer(build(kind=OwnStep), global_clipnorm=0.1)
    for call in (lambda: trainer.evaluate(X, Y), lambda: trainer.fit(X, Y)):
        with pytest.raises(UserError, match="pass global_clipnorm=… to the optimizer"):
            call()


def test_own_steps_of_a_model_that_was_compiled_again_need_a_new_trainer():
    model = build(kind=OwnStep)
    trainer = make_trainer(model)
    trainer.fit(X, Y, verbose=0)
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match="compiled again"):
        trainer.fit(X, Y)


@pytest.mark.medium
def test_a_metric_that_an_own_step_does_not_log_is_named(tmp_path):
    trainer = make_trainer(build(kind=OwnStep), tmp_path, best_metric="los")
    with pytest.raises(UserError, match=r"best_metric is 'los'"):
        trainer.fit(X, Y, validation_data=(X, Y), verbose=0)


@pytest.mark.medium
def test_checkpoints_of_own_steps_are_restored_for_evaluation(tmp_path):
    trainer = make_trainer(build(["accuracy"], OwnStep), tmp_path)
    trainer.fit(X, Y, epochs=2, verbose=0)
    expected = trainer.evaluate(X, Y, return_dict=True)
    again = make_trainer(build(["accuracy"], OwnStep), tmp_path)
    assert again.restore_for_evaluation(X) is not None
    assert again.evaluate(X, Y, return_dict=True) == pytest.approx(expected, rel=1e-6)


@pytest.mark.medium
def test_attributes_that_an_eager_step_changes_are_saved(tmp_path):
    class Counting(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.count = tf.Variable(0.0, trainable=False)

        def train_step(self, data):
            self.count.assign_add(1.0)
            return super().train_step(data) | {"count": self.count}

    def train(workdir, epochs):
        trainer = make_trainer(build(kind=Counting, run_eagerly=True), workdir)
        return trainer.fit(X, Y, batch_size=20, epochs=epochs, verbose=0).history["count"]

    train(tmp_path / "run", 1)
    assert train(tmp_path / "run", 3) == train(tmp_path / "whole", 3) == [2.0, 4.0, 6.0]


@pytest.mark.medium
def test_averages_are_taken_over_where_a_callback_stops_between_epochs():
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.stop_training = True

    def averaging():
        return build(optimizer=keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))

    ours, theirs = averaging(), averaging()
    make_trainer(ours).fit(X, Y, epochs=3, shuffle=False, callbacks=[Stops()], verbose=0)
    theirs.fit(X, Y, epochs=1, shuffle=False, verbose=0)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(a, e, atol=1e-6)
