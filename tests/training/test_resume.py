"""An interrupted run resumes and gives the same results to the bit."""

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import warm
from tests.support.models.resumed import STEPS, fit, outcome, pipeline, trainer
from tests.support.models.strategies import random_batches
from tests.support.models.training import make_trainer
from tftpu.checkpoint.store import Checkpoints
from tftpu.config import DataConfig
from tftpu.errors import Preempted
from tftpu.runtime import goodput

CUTS = sorted(np.random.default_rng(20).choice(np.arange(1, STEPS - 1), 20, False).tolist())


class CutError(Exception):
    """An exception that ends a run in the middle."""


class CutAfter(keras.callbacks.Callback):
    """A callback that ends the run at the first device loop that reaches a step."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= self.step:
            raise CutError


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    results = {}
    for replicas in (1, 2):
        workdir = tmp_path_factory.mktemp("whole")
        whole = trainer(workdir, replicas)
        history = fit(whole).history
        results[replicas] = (*outcome(whole, workdir), history)
    return results


RARE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [pytest.param(cut, marks=[] if n % 8 == 0 else RARE) for n, cut in enumerate(CUTS)],
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(cut, uninterrupted, tmp_path):
    replicas = 2 if cut % 4 == 0 else 1
    with pytest.raises(CutError):
        fit(trainer(tmp_path, replicas), [CutAfter(cut)])
    again = trainer(tmp_path, replicas)
    history = fit(again).history
    bits, lines = outcome(again, tmp_path)
    assert lines == uninterrupted[replicas][1]
    assert bits == uninterrupted[replicas][0]
    assert history == uninterrupted[replicas][2]


@pytest.mark.slow
def test_a_users_own_dataset_resumes_where_it_stopped(tmp_path):
    batches = tf.data.Dataset.from_tensor_slices(random_batches(1, 70, False)[0][:2]).batch(16)
    whole = trainer(tmp_path / "whole", 1)
    fit(whole, data=batches)
    with pytest.raises(CutError):
        fit(trainer(tmp_path / "cut", 1), [CutAfter(21)], data=batches)
    again = trainer(tmp_path / "cut", 1)
    fit(again, data=batches)
    assert outcome(again, tmp_path / "cut") == outcome(whole, tmp_path / "whole")


class PreemptAt(keras.callbacks.Callback):
    """Asks the run to stop in the device loop that ends at a step."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == self.step:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # for the thread that receives it


@pytest.mark.slow
def test_an_evaluation_left_to_the_next_run_can_be_the_best(tmp_path):
    """A run stopped at the end of an epoch saves at once; the next run evaluates."""
    with pytest.raises(Preempted):
        fit(trainer(tmp_path, 1), [PreemptAt(10)])
    checkpoints = Checkpoints(str(tmp_path))
    assert (checkpoints.list_steps()[-1], checkpoints.find_best()) == (10, None)
    with pytest.raises(CutError):
        fit(trainer(tmp_path, 1), [CutAfter(13)])
    assert Checkpoints(str(tmp_path)).find_best() == 10


@pytest.mark.slow
def test_the_account_is_written_at_the_notice_for_a_second_signal_may_follow(tmp_path):
    seen = []

    class Reads(PreemptAt):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if self.model.optimizer.iterations.numpy() == self.step:
                end = time.monotonic() + 5  # a thread writes it; the next one would be later
                while (found := goodput.read(str(tmp_path))) and found.facts.step < self.step:
                    if time.monotonic() > end:
                        break
                    time.sleep(0.05)
                seen.append(found)

    with pytest.raises(Preempted):
        fit(trainer(tmp_path, 1), [Reads(6)])
    assert [(record.state, record.facts.step) for record in seen] == [("running", 6)]
    assert seen[0].seconds["step"] > 0


@pytest.mark.slow
def test_a_notice_during_the_evaluation_that_was_left_stops_before_the_next_step(tmp_path, capfd):
    class AskInEvaluation(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # for the thread that receives it

    with pytest.raises(Preempted):
        fit(trainer(tmp_path, 1), [PreemptAt(10)])
    with pytest.raises(Preempted, match="after step 10, saved: the same command"):
        fit(trainer(tmp_path, 1), [AskInEvaluation()])
    assert "finishing what runs between the steps" in capfd.readouterr().err
    assert Checkpoints(str(tmp_path)).find_best() == 10


@pytest.mark.slow
def test_new_metrics_start_where_the_run_resumes(tmp_path, caplog):
    with pytest.raises(Preempted):
        fit(trainer(tmp_path, 1), [PreemptAt(6)])
    again = trainer(tmp_path, 1)
    again.model.compile(
        again.model.optimizer,
        again.model.loss,
        metrics=["accuracy", "sparse_categorical_crossentropy"],
    )
    history = fit(make_trainer(again.model, tmp_path, ema_momentum=0.9)).history
    assert "the means of this epoch begin at step 6" in caplog.text
    assert len(history["loss"]) == 4


@pytest.mark.slow
def test_values_that_callbacks_add_to_the_logs_are_saved_with_the_history(tmp_path):
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs |= {"f1": np.float32(0.5), "confusion": np.eye(2), "lr": tf.constant(1.0)}
            logs["note"] = self

    fit(trainer(tmp_path, 1), [Own()])
    history = fit(trainer(tmp_path, 1)).history
    assert history["f1"] == [0.5] * 4 and history["confusion"][0] == [[1.0, 0.0], [0.0, 1.0]]
    assert history["lr"] == [1.0] * 4 and "Own" in history["note"][0]


@pytest.mark.slow
def test_without_a_workdir_the_steps_of_an_earlier_call_count(uninterrupted):
    here = trainer(None, 1)
    here.fit(pipeline(), steps=12)
    here.fit(pipeline(), steps=STEPS)
    bits = [
        v.numpy().tobytes()
        for group in here.executor.variables.list_groups().values()
        for v in group
    ]
    assert bits == uninterrupted[1][0]


@pytest.mark.slow
def test_another_seed_gives_another_run(uninterrupted, tmp_path):
    """The comparison can fail."""
    other = trainer(tmp_path, 1, seed=1)
    fit(other)
    assert outcome(other, tmp_path)[0] != uninterrupted[1][0]


def run_command(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet"]
    return warm.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


SHORT = (
    "--config.train.steps=120",
    "--config.train.checkpoint_every=20",
    "--config.train.eval_every=0",
)


def weights(workdir) -> bytes:
    return (workdir / "checkpoints/120/model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_same_command_resumes_after_a_kill(tmp_path):
    killed = tmp_path / "killed"
    victim = run_command(*SHORT, f"--workdir={killed}")
    while not Checkpoints(str(killed)).list_steps() and victim.poll() is None:
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    reached = Checkpoints(str(killed)).list_steps()[-1]
    assert reached < 120
    again = run_command(*SHORT, f"--workdir={killed}")
    output, _ = again.communicate()
    assert again.returncode == 0
    assert f"Resuming from the checkpoint of step {reached}." in output
    assert run_command(*SHORT, f"--workdir={tmp_path / 'whole'}").wait() == 0
    assert weights(killed) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_preempted_run_saves_says_so_and_exits_with_75(tmp_path):
    victim = run_command("--config.train.steps=100000", f"--workdir={tmp_path}")
    for line in victim.stdout:
        if line.startswith("train"):
            break
        assert victim.poll() is None, line
    os.kill(victim.pid, signal.SIGTERM)
    output = victim.stdout.read()
    assert victim.wait() == 75
    (step,) = Checkpoints(str(tmp_path)).list_steps()
    assert f"Stopped by SIGTERM after step {step}, saved" in output
    assert "Traceback" not in output


def test_the_config_is_read_back_equal(tmp_path):
    from tftpu.config import from_json, to_json
    from tftpu.launch.settings import config_flags

    for name in config_flags.list_names():
        experiment = config_flags.load(name, [])
        assert from_json(to_json(experiment)) == experiment
        assert isinstance(experiment.data, DataConfig)
