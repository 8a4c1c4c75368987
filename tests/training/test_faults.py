"""Faults during training: the run continues, and loses only steps since a checkpoint."""

import logging
import signal
import time

import keras
import pytest

from tests.support.fakes.faulty_storage import Storage
from tests.support.models.resumed import STEPS, fit, outcome, trainer
from tftpu.checkpoint.store import Checkpoints
from tftpu.errors import Preempted, UserError
from tftpu.storage import files


class DiskOfCheckpoints:
    """A disk that rejects writes from one step of a run to another.

    Args:
        how: as `Storage` says.
    """

    def __init__(self, how: str, first: int, last: int = STEPS):
        self.callback = keras.callbacks.LambdaCallback(on_train_batch_end=self._look)
        self._sick, self._healthy = Storage(1, how), Storage()
        self._first, self._last = first, last
        self._now = self._healthy

    def _look(self, batch, logs):
        step = int(self.callback.model.optimizer.iterations.numpy())
        self._now = self._sick if self._first <= step < self._last else self._healthy

    def __call__(self, *args, **keywords):
        return self._now(*args, **keywords)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    untouched = trainer(workdir, 1)
    fit(untouched)
    return outcome(untouched, workdir)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ENOSPC", "EROFS"])
def test_a_run_outlives_a_disk_that_fails_for_a_while(how, whole, tmp_path, monkeypatch, caplog):
    disk = DiskOfCheckpoints(how, 13, 25)
    monkeypatch.setattr(files, "_operate", disk)
    run = trainer(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        fit(run, [disk.callback])
    assert "could not be saved" in caplog.text
    assert "Training continues" in caplog.text
    assert outcome(run, tmp_path) == whole
    assert Checkpoints(str(tmp_path)).list_steps()[-1] == STEPS


@pytest.mark.slow
def test_a_disk_that_stays_full_fails_with_a_clear_error_and_the_run_resumes(
    whole, tmp_path, monkeypatch
):
    disk = DiskOfCheckpoints("ENOSPC", 22, STEPS + 1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_operate", disk)
        with pytest.raises(UserError) as caught:
            fit(trainer(tmp_path, 1), [disk.callback])
    assert "the last checkpoint could not be saved" in str(caught.value)
    newest = Checkpoints(str(tmp_path)).list_steps()[-1]
    assert newest in (16, 20)  # that of step 20 may have been in progress
    assert f"resumes from step {newest}" in str(caught.value)
    again = trainer(tmp_path, 1)
    fit(again)
    assert outcome(again, tmp_path) == whole


@pytest.mark.slow
def test_a_preempted_run_that_cannot_save_names_the_step_it_resumes_from(tmp_path, monkeypatch):
    disk = DiskOfCheckpoints("ENOSPC", 18, STEPS + 1)
    monkeypatch.setattr(files, "_operate", disk)

    def preempt(batch, logs):
        if again.model.optimizer.iterations.numpy() == 19:
            signal.raise_signal(signal.SIGTERM)
            while "SIGTERM" not in heard:
                pass

    heard = []
    monkeypatch.setattr(
        "tftpu.runtime.preemption._print_status", lambda text: heard.extend(text.split(":"))
    )
    again = trainer(tmp_path, 1)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=preempt)
    with pytest.raises(Preempted, match=r"step 19, which could not be saved: .* from step 1"):
        fit(again, [disk.callback, callback])
    assert Checkpoints(str(tmp_path)).list_steps()[-1] in (12, 16)


@pytest.mark.slow
def test_a_clock_that_jumps_neither_stops_nor_floods_the_saves(tmp_path, monkeypatch):
    """A day forward, a day back: checkpoints due every few minutes follow the monotonic clock."""
    jumps = iter([0, 86_400, -86_400] * 10_000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    run = trainer(tmp_path, 1, checkpoint_every=0, checkpoint_minutes=60.0)
    saved = []
    save = run.checkpoints.save
    monkeypatch.setattr(
        run.checkpoints, "save", lambda step, *rest: (saved.append(step), save(step, *rest))[1]
    )
    fit(run)
    assert saved[-1] == STEPS
    assert set(saved) <= {10, 20, 30, STEPS}  # the best ones, and the last


@pytest.mark.slow
def test_minutes_make_checkpoints_too(tmp_path):
    run = trainer(tmp_path, 1, checkpoint_every=0, checkpoint_minutes=1e-9, keep=100)
    fit(run)
    assert len(run.checkpoints.list_steps()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_an_evaluation_skipped_by_a_notice_is_made_up_when_the_run_resumes(
    step, whole, tmp_path, monkeypatch
):
    """It may take longer than the grace period; nothing of it is lost."""
    heard = []
    monkeypatch.setattr("tftpu.runtime.preemption._print_status", heard.append)

    def preempt(batch, logs):
        if first.model.optimizer.iterations.numpy() == step:
            signal.raise_signal(signal.SIGTERM)
            while not heard:
                pass

    first = trainer(tmp_path, 1)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=preempt)
    with pytest.raises(Preempted, match=f"after step {step}, saved"):
        fit(first, [callback])
    again = trainer(tmp_path, 1)
    history = fit(again)
    assert history.epoch == [0, 1, 2, 3]
    bits, lines = outcome(again, tmp_path)
    assert bits == whole[0]
    assert lines == whole[1]
