"""The tasks of a session between its device loops."""

import errno
import json
import math
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.training import compiled, data, examples, make_trainer
from tftpu.errors import UserError
from tftpu.storage import files


def best_after(workdir, steps: int, metric: str, feature: float = 1.0) -> dict | None:
    """Trains up to a step with a learning rate of 0: every evaluation is as good as the first.

    Args:
        workdir: of the run.
        steps: total length; an evaluation follows every second one.
        metric: that is to be the best.
        feature: value of a feature of the evaluated data.
    """
    model = compiled(optimizer=keras.optimizers.SGD(0.0))
    x, y = examples(16)
    evaluated = tf.data.Dataset.from_tensor_slices((np.full_like(x, feature), y)).batch(16)
    make_trainer(model, workdir, best_metric=metric, steps_per_loop=2).fit(
        data(), steps=steps, validation_data=evaluated, eval_every=2
    )
    path = workdir / "checkpoints" / "best"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_the_best_checkpoint_is_of_its_metric_also_when_a_restart_changes_it(tmp_path):
    best = best_after(tmp_path, 2, "loss")
    assert (best["step"], best["metric"]) == (2, "loss")
    assert best_after(tmp_path, 4, "loss") == best
    changed = best_after(tmp_path, 6, "accuracy")
    assert (changed["step"], changed["metric"]) == (6, "accuracy")
    assert changed["value"] < best["value"]  # which is not a reason to keep the other


@pytest.mark.slow
def test_an_evaluation_that_is_not_finite_is_never_the_best(tmp_path, caplog):
    assert best_after(tmp_path, 2, "", math.nan) is None
    assert "The evaluation's loss is nan at step 2" in caplog.text
    assert best_after(tmp_path, 4, "")["step"] == 4


@pytest.mark.medium
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("lost", [("6",), ("4", "6")])
def test_a_best_checkpoint_that_could_not_be_saved_is_not_the_best(
    tmp_path, monkeypatch, lost, at_once
):
    """A later one, which is worse than the lost ones, can be; whenever a failure is noticed."""
    operate = files._operate

    def fail(operation, path, *args, **keywords):
        if any(f"/checkpoints/{n}/" in str(path) for n in lost) and operation == "open":
            raise OSError(errno.ENOSPC, "No space left on device")
        return operate(operation, path, *args, **keywords)

    monkeypatch.setattr(files, "_operate", fail)
    last = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((1,)), last])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = [9.0, 4.0, 0.0, 2.0, 1.0, 3.0]
    trainer = make_trainer(model, str(tmp_path))
    sets = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: last.bias.assign([losses[epoch] ** 0.5]),
        on_epoch_end=lambda epoch, logs: at_once and trainer.checkpoints.wait(),
    )
    x = np.zeros((4, 1))
    trainer.fit(x, x, 2, 6, callbacks=[sets], verbose=0, validation_data=(x, x))
    best = json.loads((tmp_path / "checkpoints/best").read_text())
    assert (best["step"], best["value"]) == (10, pytest.approx(1.0))


def test_a_best_metric_without_validation_data_fails():
    trainer = make_trainer(compiled(), best_metric="accuracy")
    with pytest.raises(UserError, match=r"best_metric is 'accuracy'.*pass validation_data"):
        trainer.fit(data(), steps=4)


def test_a_profile_after_the_last_step_fails():
    trainer = make_trainer(compiled(), profile="1:2,5000:5010")
    with pytest.raises(UserError, match="profile=5000:5010 begins after the last of the run's 4"):
        trainer.fit(data(), steps=4)


def partly_frozen(workdir, base: bool = False) -> tftpu.Trainer:
    """Returns the trainer of a model with frozen weights, which `base` leaves out."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, name="hidden", trainable=False)
    layers = [keras.Input((6,)), hidden, keras.layers.Dense(4, name="classes")]
    model = keras.Sequential(layers, name="partly_frozen")
    frozen = [v.path for v in model.weights if not v.trainable]
    return tftpu.Trainer(compiled(model), str(workdir), base=frozen if base else ())


@pytest.mark.medium
def test_a_run_with_frozen_weights_says_how_many_it_trains(tmp_path, capsys):
    trainer = partly_frozen(tmp_path)
    trainer.fit(data(), steps=1)
    trained, total = (
        sum(np.prod(v.shape) for v in weights)
        for weights in (trainer.model.trainable_weights, trainer.model.weights)
    )
    assert 0 < trained < total
    assert f"{trained:,} of {total:,} weights are trained." in capsys.readouterr().out
    make_trainer(compiled()).fit(data(), steps=1)
    assert "weights are trained" not in capsys.readouterr().out


@pytest.mark.medium
def test_statistics_are_no_frozen_weights(capsys):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    )
    make_trainer(compiled(model)).fit(data(), steps=1)
    assert "weights are trained" not in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize("first", [True, False])
def test_resuming_with_another_base_is_answered_by_the_line_to_write(tmp_path, first):
    partly_frozen(tmp_path, base=first).fit(data(), steps=1, verbose=0)
    said = r"base=tftpu.models.base_of\(model\)\)" if first else "began without base=: leave it out"
    with pytest.raises(UserError, match=said):
        partly_frozen(tmp_path, base=not first).fit(data(), steps=2, verbose=0)
    partly_frozen(tmp_path, base=first).fit(data(), steps=2, verbose=0)


@pytest.mark.slow
def test_the_time_left_leaves_out_the_first_evaluation(capsys):
    class FirstIsSlow(keras.callbacks.Callback):
        seen = 0

        def on_test_begin(self, logs=None):
            if not self.seen:
                time.sleep(2)
            self.seen += 1

    trainer = make_trainer(compiled(), steps_per_loop=5, log_every=5)
    given = {"steps": 110, "eval_every": 10, "callbacks": [FirstIsSlow()], "verbose": 2}
    trainer.fit(data().repeat(), validation_data=data(), **given)
    found = dict(re.findall(r"train +step +(\d+)/110 .* ETA 0:(\d+)", capsys.readouterr().out))
    assert not {"10", "15", "20"} & set(found)  # a short run waits for a second evaluation
    assert int(found["25"]) < 10  # the pause alone, at each of nine evaluations: 18 seconds


@pytest.mark.medium
def test_a_run_by_epochs_continues_only_with_epochs_of_its_length(tmp_path):
    """Its epochs would be counted wrong: 10 steps are one epoch of 80 examples, or two."""
    x, y = examples(80)

    def fit(workdir=tmp_path, given=None, **arguments):
        trainer = make_trainer(compiled(), workdir)
        return trainer.fit(*(given or (x, y)), verbose=0, **arguments).epoch

    assert fit(epochs=2, batch_size=8) == [0, 1]
    for other in (
        {"batch_size": 16},
        {"batch_size": 8, "given": (x[:40], y[:40])},
        {"batch_size": 8, "steps_per_epoch": 5},
        {"given": ((batch for batch in [(x, y)] * 40),)},
    ):
        with pytest.raises(UserError, match=r"is at step 20 and began with epochs of 10 steps; "):
            fit(epochs=4, **other)
    assert fit(epochs=3, batch_size=8) == [0, 1, 2]
    fit(steps=40, batch_size=16)
    with pytest.raises(UserError, match=r"step 40 .* this call has epochs of 5 steps\."):
        fit(epochs=9, batch_size=16)
    lists = type("Loader", (), {"__iter__": lambda self: iter([(x[:8], y[:8])] * 10)})
    assert fit(tmp_path / "loader", (lists(),), epochs=1) == [0]
    with pytest.raises(UserError, match="epochs of 10 steps; this call has epochs of 5 steps"):
        fit(tmp_path / "loader", epochs=2, batch_size=16)
    assert fit(tmp_path / "loader", epochs=2, batch_size=8) == [0, 1]


@pytest.mark.medium
def test_a_run_that_an_error_ended_continues_only_with_epochs_of_its_length():
    x, y = examples(80)

    def fail(batch, logs):
        if batch == 4:
            raise KeyboardInterrupt

    trainer = make_trainer(compiled())
    with pytest.raises(KeyboardInterrupt):
        failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
        trainer.fit(x, y, 8, 2, callbacks=[failing], verbose=0)
    with pytest.raises(UserError, match=r"The run is at step 5 and .* another Trainer begins"):
        trainer.fit(x, y, 16, 2, verbose=0)
    assert trainer.fit(x, y, 8, 2, verbose=0).epoch == [0, 1]
    assert trainer.fit(x, y, 16, 2, verbose=0).epoch == [0, 1]
