"""`Trainer.fit` with Keras's arguments, against Keras's own `fit`; arrays, epochs, callbacks."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.data.py_batches import Batches, Scaling, UnevenBatches
from tests.support.models.strategies import mlp, relative
from tests.support.models.training import compiled, data, examples, make_trainer
from tftpu.errors import UserError

ATOL = 1e-6
DEVICES = [1, pytest.param(4, marks=pytest.mark.slow)]


def assert_same_run(ours, history, theirs, expected):
    """Compares weights and the history of every epoch."""
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(a, e, atol=ATOL)
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=ATOL, err_msg=name)


def on_devices(count: int, **options) -> keras.Model:
    with tftpu.connect(virtual_devices=count).scope():
        return compiled(**options)


@pytest.mark.slow
# 72 examples are left to train on, 2 x 28 + 16, or 70: four devices cannot share 14.
@pytest.mark.parametrize("split", [0.25, 0.27])
@pytest.mark.parametrize("count", DEVICES)
def test_fit_on_arrays_equals_keras_fit_with_a_smaller_last_batch(count, split):
    x, y = examples()
    arguments = {
        "batch_size": 28, "epochs": 2, "validation_split": split, "shuffle": False, "verbose": 0
    }  # fmt: skip
    ours, theirs = on_devices(count), compiled()
    history = make_trainer(ours).fit(x, y, **arguments)
    assert_same_run(ours, history, theirs, theirs.fit(x, y, **arguments))


def frames():
    import pandas

    x, y = examples(40)
    return pandas.DataFrame(x), pandas.Series(y)


def structures():
    x, y = examples(40)
    return {"left": x, "right": x[::-1].copy()}, y


def two_inputs() -> keras.Model:
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    keras.utils.set_random_seed(0)
    both = keras.layers.Concatenate()([left, right])
    return keras.Model({"left": left, "right": right}, keras.layers.Dense(4)(both))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "given", "arguments"),
    [
        (mlp, lambda: examples(40), {"batch_size": 12}),
        (mlp, lambda: examples(40), {"batch_size": 12, "class_weight": {0: 0.5, 2: 3.0}}),
        (mlp, lambda: examples(40), {"batch_size": 12, "sample_weight": np.linspace(0, 2, 40)}),
        (mlp, lambda: examples(40), {"steps_per_epoch": 5}),
        (mlp, frames, {"batch_size": 12}),
        (two_inputs, structures, {"batch_size": 12}),
        (mlp, lambda: (data(12, 40), None), {}),
        (mlp, lambda: (Batches(40, 12), None), {}),
        (mlp, lambda: (Batches(40, 12, workers=3), None), {}),
        (mlp, lambda: (data(12, 40).repeat(), None), {"steps_per_epoch": 4, "drop": True}),
    ],
    ids=[
        *("arrays", "class_weight", "sample_weight", "steps_per_epoch", "pandas", "dict"),
        *("tf.data", "PyDataset", "workers", "endless"),
    ],
)
def test_every_kind_of_data_trains_as_in_keras(make, given, arguments):
    arguments = dict(arguments)
    x, y = given()
    if arguments.pop("drop", False):  # an endless stream fills its batches up
        x = data(12, 36).repeat()
    arguments |= {"epochs": 2, "shuffle": False, "verbose": 0}
    ours, theirs = compiled(make()), compiled(make())
    history = make_trainer(ours).fit(x, y, **arguments)
    assert_same_run(ours, history, theirs, theirs.fit(*given_again(given, x), **arguments))


CHANGING = {
    "PyDataset": lambda batches: batches,
    "generator": Batches.generated,
    "stream": lambda batches: batches.generated().repeat(),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", DEVICES)
@pytest.mark.parametrize(("kind", "workers"), [*((kind, 1) for kind in CHANGING), ("PyDataset", 3)])
def test_what_a_callback_changes_in_the_data_is_in_the_next_epoch_as_in_keras(kind, workers, count):
    found, events = [], {}
    for engine, model in (("ours", on_devices(count)), ("Keras", compiled())):
        given = Batches(40, 8, workers=workers)
        # Keras reads a stream ahead: to it, the same data are given in epochs.
        stream = kind == "stream" and engine == "ours"
        data = CHANGING["generator" if kind == "stream" and not stream else kind](given)
        validation = Batches(20, 8, given.events, "validation ")
        fit = make_trainer(model).fit if engine == "ours" else model.fit
        history = fit(
            data, epochs=4, steps_per_epoch=5 if stream else None, shuffle=False, verbose=0,
            callbacks=[Scaling(given)], validation_data=validation,
        )  # fmt: skip
        found += [model, history]
        events[engine] = given.events
    assert_same_run(*found)
    assert events["ours"] == events["Keras"] and "epoch 3 ends" in events["ours"]


@pytest.mark.medium
def test_a_data_set_is_told_of_its_passes_by_evaluate_and_predict_as_in_keras():
    ours, theirs = Batches(20, 8), Batches(20, 8)
    model, other = compiled(), compiled()
    trainer = make_trainer(model)
    expected = other.evaluate(theirs, verbose=0, return_dict=True, steps=2)
    found = trainer.evaluate(ours, steps=2, return_dict=True)
    np.testing.assert_allclose(found["loss"], expected["loss"], atol=ATOL)
    outputs = other.predict(theirs, verbose=0)
    np.testing.assert_allclose(trainer.predict(ours), outputs, atol=ATOL)
    assert ours.events == theirs.events and ours.events.count("begins") == 2


@pytest.mark.slow
def test_a_trainer_that_fits_and_predicts_again_and_again_keeps_nothing():
    x, y = examples(48)
    trainer, held = make_trainer(compiled()), []
    for epochs in range(1, 5):
        trainer.fit(x, y, batch_size=16, epochs=epochs, verbose=0, validation_data=(x, y))
        trainer.predict(x)
        gc.collect()
        held.append(sum(isinstance(one, tf.Graph) for one in gc.get_objects()))
    assert held[1:] == held[1:2] * 3


def given_again(given, x):
    return given() if not isinstance(x, tf.data.Dataset) else (x, None)


@pytest.mark.slow
def test_validation_data_callbacks_and_initial_epoch_work_as_in_keras():
    x, y = examples(48)
    weights = np.linspace(0.5, 2, 20)
    calls: dict[str, list] = {"ours": [], "theirs": []}

    class Record(keras.callbacks.Callback):
        def __init__(self, into):
            super().__init__()
            self.into = into

        def on_epoch_begin(self, epoch, logs=None):
            self.into.append(("begin", epoch))

        def on_epoch_end(self, epoch, logs=None):
            self.into.append(("end", epoch))

        def on_test_begin(self, logs=None):
            self.into.append("test")

        def on_test_end(self, logs=None):
            self.into.append(sorted(logs))

    ours, theirs = compiled(), compiled()
    arguments = {
        "batch_size": 16, "epochs": 4, "initial_epoch": 2, "shuffle": False, "verbose": 0,
        "validation_data": (x[:20], y[:20], weights), "validation_batch_size": 6,
    }  # fmt: skip
    expected = theirs.fit(x, y, callbacks=Record(calls["theirs"]), **arguments)
    history = make_trainer(ours).fit(x, y, callbacks=Record(calls["ours"]), **arguments)
    assert_same_run(ours, history, theirs, expected)
    assert calls["ours"] == calls["theirs"] and ("begin", 2) in calls["ours"]


@pytest.mark.medium
@pytest.mark.parametrize("every", [2, [1, 4]])
def test_only_some_epochs_are_evaluated_as_in_keras(every):
    x, y = examples(48)
    arguments = {
        "batch_size": 16, "epochs": 4, "shuffle": False, "verbose": 0,
        "validation_data": (x[:20], y[:20]), "validation_freq": every,
    }  # fmt: skip
    ours, theirs = compiled(), compiled()
    history, expected = make_trainer(ours).fit(x, y, **arguments), theirs.fit(x, y, **arguments)
    assert_same_run(ours, history, theirs, expected)
    assert len(history.history["val_loss"]) == 2


@pytest.mark.medium
@pytest.mark.parametrize(
    "length", [{"epochs": np.int64(2), "validation_freq": np.int32(2)}, {"steps": np.int64(6)}]
)
def test_the_length_of_a_run_may_be_a_number_of_numpys(length, tmp_path):
    """They are also written to the files of the workdir, as JSON."""
    x, y = examples(48)
    trainer = make_trainer(compiled(), tmp_path)
    history = trainer.fit(x, y, batch_size=16, verbose=0, validation_data=(x, y), **length)
    assert trainer.step == 6 and len(history.history["val_loss"]) == 1


@pytest.mark.medium
def test_a_backup_of_an_earlier_epoch_is_continued_from_there(tmp_path):
    """The third epoch fails before it is backed up, and is trained again."""
    x, y = examples(48)
    failing = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: 1 / (epoch - 2))
    arguments = {"batch_size": 16, "epochs": 5, "shuffle": False, "verbose": 0}
    runs = {}
    for name, fitted in (("ours", make_trainer(compiled())), ("theirs", compiled())):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / name))
        with pytest.raises(ZeroDivisionError):
            fitted.fit(x, y, callbacks=[failing, backup], **arguments)
        model = getattr(fitted, "model", fitted)
        runs[name] = model, fitted.fit(x, y, callbacks=[backup], **arguments)
    (ours, history), (theirs, expected) = runs["ours"], runs["theirs"]
    assert history.epoch == [0, 1, 2, 3, 4] and expected.epoch == [2, 3, 4]
    assert history.history["loss"][2:] == pytest.approx(expected.history["loss"], rel=1e-6)
    for mine, other in zip(ours.trainable_variables, theirs.trainable_variables):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_evaluate_and_predict_take_arrays(count):
    x, y = examples(77)
    weights = np.linspace(0.1, 2, 77).astype(np.float32)
    calls = []

    class Record(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            calls.append(logs)

        def on_predict_batch_end(self, batch, logs=None):
            calls.append(logs["outputs"])

        def on_predict_end(self, logs=None):
            calls.append("end")

    trainer = make_trainer(on_devices(count))
    results = trainer.evaluate(
        x, y, batch_size=20, sample_weight=weights, callbacks=Record(), return_dict=True
    )
    outputs = trainer.predict(x, batch_size=20, callbacks=[Record()])
    theirs = compiled()
    expected = theirs.evaluate(x, y, 77, 0, sample_weight=weights, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(outputs, theirs.predict(x, verbose=0), atol=1e-6)
    assert calls[0] == results and calls[-1] == "end"
    np.testing.assert_array_equal(np.concatenate(calls[1:-1]), outputs)
    assert list(map(len, calls[1:-1])) == [20, 20, 20, 17]
    assert trainer.evaluate(x, y, batch_size=11, steps=7, return_dict=True) == trainer.evaluate(
        x, y, batch_size=7, return_dict=True
    )


# Order and resuming


def shuffled_run(workdir, epochs: int, callbacks=(), count: int = 1, given=None):
    trainer = make_trainer(on_devices(count), workdir, steps_per_loop=2, checkpoint_every=2)
    x, y = given or examples(88)
    history = trainer.fit(
        x, y, batch_size=None if given else 20, epochs=epochs, callbacks=callbacks, verbose=0
    )
    return trainer, history


class StopAfter(keras.callbacks.Callback):
    """Interrupts the run, or ends it as early stopping does."""

    def __init__(self, step: int, interrupt: bool):
        super().__init__()
        self.step, self.interrupt = step, interrupt

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= self.step:
            if self.interrupt:
                raise KeyboardInterrupt
            self.model.stop_training = True


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "PyDataset"])
def test_a_shuffled_run_resumes_to_the_bit(tmp_path, given):
    make = (lambda: (Batches(88, 20), None)) if given else (lambda: None)
    whole, expected = shuffled_run(tmp_path / "whole", 4, given=make())
    with pytest.raises(KeyboardInterrupt):
        shuffled_run(tmp_path / "cut", 4, [StopAfter(11, True)], given=make())
    again, history = shuffled_run(tmp_path / "cut", 4, given=make())
    for a, e in zip(again.model.get_weights(), whole.model.get_weights()):
        np.testing.assert_array_equal(a, e)
    assert history.history == expected.history and history.epoch == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_shuffled_run_is_the_same_on_four_devices(tmp_path):
    one, expected = shuffled_run(None, 2)
    four, history = shuffled_run(None, 2, count=4)
    for a, e in zip(four.model.get_weights(), one.model.get_weights()):
        assert relative(a, e) < 1e-6
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-6)


@pytest.mark.slow
def test_a_run_that_a_callback_ended_stays_ended_until_it_gets_longer(tmp_path, capsys):
    shuffled_run(tmp_path, 4, [StopAfter(10, False)])
    again, history = shuffled_run(tmp_path, 4)
    assert again.step == 10 and history.epoch == [0, 1]
    trainer = make_trainer(compiled(), tmp_path)
    x, y = examples(88)
    trainer.fit(x, y, batch_size=20, epochs=4)
    said = capsys.readouterr().out
    assert (
        "was ended by a callback at step 10 of 20" in said and "more than 20 steps continue" in said
    )
    longer, history = shuffled_run(tmp_path, 5)
    assert longer.step == 25 and history.epoch == [0, 1, 2, 3, 4]


@pytest.mark.medium
def test_a_call_without_a_workdir_trains_again_as_in_keras():
    x, y = examples()
    ours, theirs = compiled(), compiled()
    trainer = make_trainer(ours)
    for arguments in ({"epochs": 2}, {"epochs": 2}, {"epochs": 4, "initial_epoch": 3}):
        own = trainer.fit(x, y, 16, shuffle=False, verbose=0, **arguments)
        keras_own = theirs.fit(x, y, 16, shuffle=False, verbose=0, **arguments)
        assert own.epoch == keras_own.epoch
        np.testing.assert_allclose(own.history["loss"], keras_own.history["loss"], rtol=1e-5)
    for a, e in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(a, e, atol=1e-6)


@pytest.mark.medium
def test_calls_without_a_workdir_have_other_orders_of_the_examples():
    x, y = examples(32)
    model = compiled()
    model.optimizer.learning_rate = 0.0
    trainer = make_trainer(model)
    last = [trainer.fit(x, y, 24, 1, steps_per_epoch=1, verbose=0).history["loss"] for _ in "ab"]
    assert last[0] != last[1]


@pytest.mark.medium
@pytest.mark.parametrize(("epochs", "warned"), [(1, False), (2, False), (3, True)])
def test_epochs_that_end_with_the_data_are_warned_of_only_if_there_are_any(epochs, warned):
    """The data have 25 batches, so that the third epoch of 10 has 5."""
    x, y = examples(100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(compiled()).fit(x, y, 4, epochs, steps_per_epoch=10, verbose=0)
    assert warned == any("some epochs end before" in str(w.message) for w in caught)


@pytest.mark.medium
def test_steps_count_from_the_beginning_of_the_run_and_epochs_too_in_a_workdir(tmp_path):
    x, y = examples(32)
    for workdir, lengths in ((None, ("steps",)), (tmp_path / "run", ("steps", "epochs"))):
        for length in lengths:
            trainer = make_trainer(compiled(), workdir and workdir / length, log_every=1)
            for count in (2, 2, 4):
                trainer.fit(x, y, batch_size=32, verbose=0, **{length: count})
                assert trainer.step == count


@pytest.mark.medium
def test_verbose_2_prints_lines_and_0_nothing(capsys):
    x, y = examples()
    make_trainer(compiled(), log_every=3).fit(x, y, epochs=1, verbose=2)
    said = capsys.readouterr().out
    assert said.startswith("Compiling the train step ...\n") and said.count("Compiling") == 1
    assert "loss" in said
    make_trainer(compiled(), log_every=3).fit(x, y, epochs=1, verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.medium
def test_evaluate_and_predict_print_if_they_are_asked_to(capsys):
    x, y = examples(32)
    trainer = make_trainer(compiled())
    results = trainer.evaluate(x, y, 16, 0, return_dict=True)
    trainer.predict(x, verbose=0)
    assert capsys.readouterr().out == ""
    trainer.evaluate(x, y, verbose=1, return_dict=True)
    trainer.predict(x, verbose="auto")
    assert f"accuracy {results['accuracy']:.4g}"[:12] in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize("sizes", [[16, 8, 16, 8], [8, 16, 8], [8, 8, 16]])
def test_batches_of_other_sizes_before_the_last_are_refused_and_are_evaluated(sizes):
    """The second has no other size at its ends, and the last is larger in the third."""
    trainer, theirs = make_trainer(compiled()), compiled()
    expected = theirs.evaluate(UnevenBatches(sizes), verbose=0)
    assert trainer.evaluate(UnevenBatches(sizes), verbose=0) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match=r"A batch .*A generator may yield batches of any size"):
        trainer.fit(UnevenBatches(sizes), epochs=2, verbose=0)
    batches, trainer = UnevenBatches(sizes), make_trainer(compiled())
    trainer.fit((batches[i] for i in range(len(sizes))), verbose=0)
    theirs.fit(UnevenBatches(sizes), shuffle=False, verbose=0)
    for ours, other in zip(trainer.model.trainable_variables, theirs.trainable_variables):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-7)
