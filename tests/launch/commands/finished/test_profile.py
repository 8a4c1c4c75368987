"""`tftpu profile`: what the steps of a run spend their time on."""

import os
import signal

import keras
import pytest

from tests.support.models.training import compiled, data, make_trainer
from tftpu.errors import UserError
from tftpu.launch.commands.finished import profile


@pytest.mark.slow
def test_a_profile_names_its_steps_and_the_ops_of_the_model(finished_run):
    found = profile.read(str(finished_run))
    assert found.steps == 5
    assert any("MatMul" in op.kind for op in found.ops)
    text = "\n".join(profile.describe_profile(found))
    assert "5 steps on CPU" in text
    assert not list((finished_run / "plugins").rglob("*.pb.tmp"))
    assert [p.suffix for p in (finished_run / "plugins").rglob("*") if p.is_file()] == [".pb"]


@pytest.mark.slow
def test_a_profile_of_a_starved_run_says_that_it_waits_for_its_input(finished_run, starved_run):
    waits = profile.read(str(starved_run))
    assert waits.input_share > 0.3  # nearly all, except on a busy machine
    assert "input pipeline" in profile.find_bottleneck(waits)
    assert waits.step_ms[0] > 80
    text = "\n".join(profile.compare_profiles(profile.read(str(finished_run)), waits))
    assert "input wait, ms" in text and "B / A" in text


@pytest.mark.medium
def test_a_signal_asks_for_a_profile_of_a_running_process(tmp_path):
    class Signal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 20:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = make_trainer(compiled(), tmp_path, steps_per_loop=5)
    before = signal.getsignal(signal.SIGUSR1)
    trainer.fit(data(), steps=60, callbacks=[Signal()])
    assert profile.read(str(tmp_path)).steps == 10
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("trace", [None, b"cut off"])
def test_an_incomplete_profile_fails_with_a_clear_error(trace, tmp_path):
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    if trace:
        (folder / "host.xplane.pb").write_bytes(trace)
    with pytest.raises(UserError, match="The newest profile cannot be read"):
        profile.read(str(tmp_path))


@pytest.mark.medium
def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "plugins").write_text("in the way")
    trainer = make_trainer(compiled(), tmp_path, profile="5:10")
    trainer.fit(data(), steps=20)
    assert "The profile could not be written" in caplog.text
    assert trainer.checkpoints.list_steps() == [20]


@pytest.mark.slow
def test_a_slow_device_loop_is_followed_by_a_profile(tmp_path, capfd):
    class Stall(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 30:
                trainer._profiler.observe(1000.0)  # as the loop of step 30 would have

    trainer = make_trainer(compiled(), tmp_path, steps_per_loop=1, profile="slow")
    for _ in range(100):  # loops so long that on a busy machine no true one counts as slow
        trainer._profiler.observe(100.0)
    trainer.fit(data().cache().repeat(), steps=60, callbacks=[Stall()])
    assert profile.read(str(tmp_path)).steps == 10
    assert capfd.readouterr().err.count("profiling the next 10 steps") == 1
    assert len(trainer._profiler._loops) > 101  # the run's own loops were recorded as well
    assert trainer.account.clock.sum_seconds()["profiling"] > 0
