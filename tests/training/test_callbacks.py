"""Keras's callbacks over the end of a run and its restart."""

import signal
import time

import keras
import numpy as np
import pytest

from tests.support.models.training import compiled, examples, make_trainer
from tftpu.errors import Preempted, UserError

X, Y = examples(64)
OTHER = np.roll(Y, 1)  # labels that training makes worse
RATE = 0.5


def trained(workdir, callbacks, epochs: int):
    trainer = make_trainer(compiled(optimizer=keras.optimizers.SGD(RATE)), str(workdir))
    trainer.fit(X, Y, epochs=epochs, verbose=0, validation_data=(X, OTHER), callbacks=callbacks)
    return trainer


@pytest.mark.slow
def test_the_last_checkpoint_holds_the_weights_that_early_stopping_restored(tmp_path):
    def stopped():
        stop = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
        trainer = trained(tmp_path, stop, epochs=20)
        return (
            trainer.step,
            trainer.evaluate(X, OTHER, return_dict=True),
            trainer.model.get_weights(),
        )

    steps, results, weights = stopped()
    assert steps < 40
    steps_again, again, weights_again = stopped()  # the same command, in another process
    assert (steps_again, again) == (steps, results)
    for one, other in zip(weights, weights_again):
        np.testing.assert_array_equal(one, other)


@pytest.mark.medium
def test_a_callback_that_fails_at_the_end_leaves_the_last_checkpoint(tmp_path):
    class Failing(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        trained(tmp_path, Failing(), epochs=2)
    assert make_trainer(compiled(), str(tmp_path)).checkpoints.list_steps()[-1] == 4


@pytest.mark.slow
def test_a_resumed_model_checkpoint_keeps_the_best_file(tmp_path):
    def best_file(name: str, lengths: tuple[int, ...]) -> list:
        path = str(tmp_path / f"{name}.weights.h5")
        for epochs in lengths:
            keep = keras.callbacks.ModelCheckpoint(
                path, save_best_only=True, save_weights_only=True
            )
            trained(tmp_path / name, keep, epochs)
        model = compiled()
        model.load_weights(path)
        return model.get_weights()

    for one, other in zip(best_file("whole", (5,)), best_file("resumed", (2, 3, 5))):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_counters_of_callbacks_go_on_over_a_restart(tmp_path):
    def rates(name: str, lengths: tuple[int, ...]) -> list[float]:
        for epochs in lengths:
            lower = keras.callbacks.ReduceLROnPlateau(patience=3, cooldown=1, factor=0.5)
            trainer = make_trainer(
                compiled(optimizer=keras.optimizers.SGD(RATE)), str(tmp_path / name)
            )
            history = trainer.fit(
                X, Y, epochs=epochs, verbose=0, validation_data=(X, OTHER), callbacks=lower
            )
        return history.history["learning_rate"]

    whole = rates("whole", (9,))
    assert len(set(whole)) > 1
    assert rates("resumed", (3, 5, 9)) == whole


@pytest.mark.slow
def test_a_callback_that_is_added_or_left_out_leaves_the_others_their_counters(tmp_path):
    """Two of one class that monitor the same are told apart by their order."""

    def stops(*patience: int) -> list:
        return [keras.callbacks.EarlyStopping(patience=one) for one in patience]

    plateau = keras.callbacks.ReduceLROnPlateau(patience=9)
    trained(tmp_path, [*stops(8), plateau], epochs=3)  # no epoch is better than the first
    kept = keras.callbacks.ModelCheckpoint(str(tmp_path / "a.weights.h5"), save_weights_only=True)
    plateau, both = keras.callbacks.ReduceLROnPlateau(patience=9), stops(8, 9)
    trained(tmp_path, [kept, plateau, *both], epochs=4)
    assert [one.wait for one in (plateau, *both)] == [3, 3, 0]
    plateau = keras.callbacks.ReduceLROnPlateau(patience=9)
    trained(tmp_path, [plateau], epochs=5)
    assert plateau.wait == 4


@pytest.mark.slow
def test_early_stopping_counts_on_over_a_restart_and_anew_after_it_stopped(tmp_path):
    def stop():
        return keras.callbacks.EarlyStopping(patience=3)

    whole = trained(tmp_path / "whole", stop(), epochs=20).step
    assert 6 < whole < 30
    trained(tmp_path / "resumed", stop(), epochs=3)
    assert trained(tmp_path / "resumed", stop(), epochs=20).step == whole
    assert trained(tmp_path / "resumed", stop(), epochs=40).step > whole + 2


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (keras.callbacks.EarlyStopping("val_acuracy"), "Did you mean 'val_accuracy'"),
        (keras.callbacks.ReduceLROnPlateau("f1"), "ReduceLROnPlateau monitors 'f1', which is not"),
        (
            keras.callbacks.ModelCheckpoint("a.keras", "val_f1", save_best_only=True),
            "ModelCheckpoint monitors 'val_f1', which is not logged",
        ),
        (keras.callbacks.EarlyStopping("grad_norm"), "'grad_norm', which is not logged"),
    ],
)
def test_what_a_callback_monitors_is_checked_before_training(callback, message):
    trainer = make_trainer(compiled())
    with pytest.raises(UserError, match=message):
        trainer.fit(X, Y, verbose=0, validation_data=(X, OTHER), callbacks=[callback])
    assert trainer.step == 0


class Logging(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["own"] = 1.0


LOGGING = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=1.0))


@pytest.mark.medium
@pytest.mark.parametrize("logging", [Logging(), LOGGING])
def test_what_an_earlier_callback_logs_can_be_monitored(logging):
    stop = keras.callbacks.EarlyStopping("own", patience=1, mode="min")
    trainer = make_trainer(compiled())
    trainer.fit(X, Y, verbose=0, epochs=9, callbacks=[logging, stop])
    assert stop.stopped_epoch == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (keras.callbacks.EarlyStopping(), "'val_loss', which is not logged.* no validation data"),
        (keras.callbacks.ReduceLROnPlateau(), "ReduceLROnPlateau monitors 'val_loss', which is"),
        (keras.callbacks.EarlyStopping("f1", mode="max"), "'f1', which is not logged. Allowed: "),
    ],
)
def test_what_keras_trains_without_what_is_monitored_is_trained_with_a_warning(callback, message):
    trainer = make_trainer(compiled())
    with pytest.warns(UserWarning, match=message) as warned:
        trainer.fit(X, Y, verbose=0, epochs=2, callbacks=[callback])
    assert trainer.step == 4
    assert str(warned[0].message).count("learning_rate") <= 1  # the names are listed once


class StopError(Exception):
    """An error that ends a run."""


class StopAt(keras.callbacks.Callback):
    """A callback that ends the run: by an error in a method, or by a signal after a batch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise StopError

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 8:  # the last batch of epoch 1
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.5)  # for the thread that receives it


class StopByError(StopAt):
    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end


@pytest.mark.medium
@pytest.mark.parametrize(
    ("stop", "every"), [(StopByError(), 4), (StopByError(), 3), (StopAt(), 4), (None, 4)]
)
def test_a_schedule_that_depends_on_its_last_rate_goes_on_over_a_restart(tmp_path, stop, every):
    """The scheduler of Keras's documentation multiplies the rate of the last epoch."""
    calls = []
    listens = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: calls.append(("begin", epoch)),
        on_epoch_end=lambda epoch, logs: calls.append(("end", epoch)),
    )

    def train(*others):
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        model = compiled(optimizer=keras.optimizers.SGD(RATE))
        trainer = make_trainer(model, str(tmp_path), checkpoint_every=every, steps_per_loop=1)
        callbacks = [halves, listens, *others]
        return trainer.fit(X, Y, batch_size=16, epochs=4, verbose=0, callbacks=callbacks).history

    if stop is not None:
        with pytest.raises((StopError, Preempted)):
            train(stop)
    resumes = len(calls)
    assert train()["learning_rate"] == [RATE / 2, RATE / 4, RATE / 8, RATE / 16]
    if type(stop) is StopAt:  # the end of epoch 1 was left to the next run
        assert calls[resumes : resumes + 3] == [("begin", 1), ("end", 1), ("begin", 2)]


@pytest.mark.medium
def test_counters_of_callbacks_return_with_a_rollback(tmp_path):
    """Epochs that are trained again are counted once."""

    class Breaks(keras.callbacks.Callback):
        broken = False

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3 and not self.broken:
                self.broken = True
                self.model.set_weights([w * np.nan for w in self.model.get_weights()])

    waits = {}
    stop = keras.callbacks.EarlyStopping(patience=9)
    listens = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: waits.setdefault(epoch, []).append(stop.wait)
    )
    trainer = make_trainer(
        compiled(optimizer=keras.optimizers.SGD(RATE)), str(tmp_path), on_nan="rollback"
    )
    trainer.fit(
        *(X, Y),
        epochs=5,
        verbose=0,
        validation_data=(X, OTHER),
        callbacks=[stop, listens, Breaks()],
    )
    assert waits == {0: [0], 1: [1, 1], 2: [2, 2], 3: [3], 4: [4]}
