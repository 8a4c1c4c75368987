"""The account of a run's time: every second counts once, also across restarts."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import types

import keras
import pytest

import tftpu
from tests.support import warm
from tests.support.models.training import compiled, data, make_trainer, slowly
from tftpu.runtime import goodput

# A run of 60 steps that saves every 20, for a separate process; it reports its position, and waits
# at the step at which it will be killed.
RUN = textwrap.dedent(
    """
    import dataclasses, os, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras, tensorflow as tf, tftpu
    from tests.support.models.training import make_trainer
    from tests.support.models.training import compiled, data
    from tftpu.runtime import goodput

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)
            if self.model.optimizer.iterations.numpy() == int(sys.argv[2]):
                facts = dataclasses.replace(trainer.account.facts, step=int(sys.argv[2]))
                trainer.account.write("running", facts)
                print("here", flush=True)
                time.sleep(60)

    trainer = make_trainer(
        compiled(), sys.argv[1], steps_per_loop=1, log_every=10, checkpoint_every=20
    )
    account = trainer.account
    account.add_earlier(goodput.process_age() - account.clock.measure_wall())
    trainer.fit(data(), steps=60, validation_data=data(), callbacks=[Watch()], verbose=False)
    print("done", flush=True)
    os._exit(0)
    """
)


def start(workdir, stop_at: int) -> subprocess.Popen:
    # Not by the fork server: what it takes until it forks is in no process's time.
    command = [sys.executable, "-c", RUN, str(workdir), str(stop_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """Returns the account and wall time of a run killed at step 33, 13 after its checkpoint."""
    workdir = tmp_path_factory.mktemp("goodput")
    began = time.time()
    first = start(workdir, 33)
    assert first.stdout.readline() == "here\n"
    first.kill()
    first.wait()
    between = goodput.read(workdir)
    time.sleep(1.5)
    second = start(workdir, -1)
    assert second.stdout.readline() == "done\n"
    passed = time.time() - began
    second.wait()
    record = goodput.read(workdir)
    # Until the account was written, which takes a while on a busy disk.
    wall = record.updated - began
    assert wall <= passed < wall + 10
    return between, record, wall


@pytest.mark.slow
def test_the_parts_sum_to_the_wall_time_over_a_restart(killed_and_resumed):
    _, record, wall = killed_and_resumed
    assert sum(record.seconds.values()) == pytest.approx(wall, rel=0.01)
    assert record.wall_seconds == pytest.approx(wall, rel=0.01)
    assert set(record.seconds) == set(goodput.PARTS)
    assert record.updated - record.started == pytest.approx(wall, rel=0.01)


@pytest.mark.slow
def test_time_lost_to_a_kill_counts_as_restart(killed_and_resumed):
    between, record, _ = killed_and_resumed
    assert (between.state, between.restarts, between.facts.step) == ("running", 0, 33)
    assert between.seconds["restart"] == 0
    assert (record.state, record.restarts, record.facts.step) == ("finished", 1, 60)
    assert record.repeated_steps == 13
    # The pause, and 13 steps of at least 20 ms each.
    assert 1.5 + 12 * 0.02 < record.seconds["restart"] < 20
    # 20 + 27 steps count once; each took 20 ms or more.
    assert record.seconds["step"] > 45 * 0.02


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_input_wait_equals_the_time_of_a_slow_pipeline(replicas, tmp_path):
    """A pipeline that takes 20 ms or more for a batch."""
    with tftpu.connect(virtual_devices=replicas).scope():
        model = compiled()
    # One line at the end: a wait of less than a second since the last line is no concern.
    trainer = make_trainer(model, tmp_path, steps_per_loop=10, log_every=100)
    began = time.monotonic()
    trainer.fit(data().cache().repeat().map(slowly), steps=100)
    wall = time.monotonic() - began
    seconds = trainer.account.sum_seconds()
    # What is read ahead during a step is not waited for, and a busy machine's steps are long.
    assert 0.85 * 100 * 0.02 - seconds["step"] < seconds["input_wait"] < wall - seconds["step"]
    text = (tmp_path / "train.log").read_text()
    assert "Input wait is " in text and "`tftpu data check`" in text


@pytest.mark.slow
def test_evaluations_that_take_longer_than_the_steps_are_named_during_the_run(tmp_path):
    trainer = make_trainer(compiled(), tmp_path, log_every=10)
    trainer.fit(data().repeat(), validation_data=data().map(slowly), steps=30, eval_every=5)
    text = (tmp_path / "train.log").read_text()
    assert re.search(r"Note at step 30: Evaluation took \d+ % of the last \d+ s: evaluate", text)
    seldom = make_trainer(compiled(), tmp_path / "seldom", log_every=10)
    seldom.fit(data().repeat(), validation_data=data().map(slowly), steps=30, eval_every=20)
    assert "Evaluation took" not in (tmp_path / "seldom/train.log").read_text()


@pytest.mark.slow
def test_a_fast_pipeline_is_not_waited_for(tmp_path):
    """Batches in memory, and a step of nine million weights."""
    wide = [keras.layers.Dense(3000, "relu"), keras.layers.Dense(3000, "relu")]
    model = keras.Sequential([*wide, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    trainer = make_trainer(model, tmp_path)
    trainer.fit(data().cache().repeat(), steps=100)
    seconds = trainer.account.sum_seconds()
    assert seconds["input_wait"] < 0.3 * seconds["step"]


@pytest.mark.medium
def test_a_finished_run_that_is_asked_for_fewer_steps_has_all_that_it_trained(tmp_path):
    for steps in (6, 2):
        trainer = make_trainer(compiled(), tmp_path, steps_per_loop=2)
        trainer.fit(data(8), steps=steps, verbose=0)
        facts = goodput.read(str(tmp_path)).facts
        assert (facts.step, facts.steps) == (6, 6)


def test_nested_blocks_count_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    clock = goodput.Clock()
    now[0] += 0.5
    with clock.spend("evaluation"):
        now[0] += 1.0
        with clock.spend("compiling"):
            now[0] += 4.0
        now[0] += 2.0
    seconds = clock.sum_seconds()
    assert (seconds["starting"], seconds["compiling"], seconds["evaluation"]) == (0.5, 4.0, 3.0)
    assert sum(seconds.values()) == 7.5


@pytest.mark.parametrize(
    ("state", "counts"),
    [("running", True), ("preempted", True), ("failed", True), ("finished", False), ("stopped", 0)],
)
def test_the_time_until_a_restart_counts_if_the_run_was_cut_off(state, counts, tmp_path):
    clock = goodput.Clock()
    account = goodput.Account(str(tmp_path), clock)
    account.write(state, goodput.Facts())
    record = json.loads((tmp_path / goodput.FILE).read_text())
    record["uptime"] -= 100
    (tmp_path / goodput.FILE).write_text(json.dumps(record))
    again = goodput.Account(str(tmp_path), goodput.Clock())
    assert again.sum_seconds()["restart"] == pytest.approx(100.0 if counts else 0.0, abs=1.0)


def test_a_clock_that_was_set_back_subtracts_nothing(tmp_path):
    goodput.Account(str(tmp_path), goodput.Clock()).write(goodput.RUNNING, goodput.Facts())
    record = json.loads((tmp_path / goodput.FILE).read_text())
    record["updated"] += 3600
    for boot in (record["boot"], "another machine"):
        (tmp_path / goodput.FILE).write_text(json.dumps(record | {"boot": boot}))
        again = goodput.Account(str(tmp_path), goodput.Clock())
        assert again.sum_seconds()["restart"] == pytest.approx(0.0, abs=1.0)


def test_time_on_another_machine_is_lost_by_the_clock_of_days(tmp_path):
    goodput.Account(str(tmp_path), goodput.Clock()).write(goodput.RUNNING, goodput.Facts())
    record = json.loads((tmp_path / goodput.FILE).read_text())
    record |= {"updated": record["updated"] - 100, "boot": "another machine"}
    (tmp_path / goodput.FILE).write_text(json.dumps(record))
    again = goodput.Account(str(tmp_path), goodput.Clock())
    assert again.sum_seconds()["restart"] == pytest.approx(100.0, abs=1.0)


YEARS = 10 * 365 * 86_400.0


@pytest.mark.parametrize("boot", ["this machine", "another machine"])
@pytest.mark.parametrize("ahead", ["first", "second"])
def test_a_clock_ten_years_ahead_does_not_destroy_the_account(ahead, boot, tmp_path, monkeypatch):
    """Neither while it is wrong, nor for the processes after it."""
    real, wrong = time.time, lambda: real() + YEARS
    for number, name in enumerate(("first", "second", "third")):
        monkeypatch.setattr(time, "time", wrong if name == ahead else real)
        account = goodput.Account(str(tmp_path), goodput.Clock())
        account.clock.turn_to("step")
        account.clock.move(0.0, "step", "step")
        account.count_steps(number, number + 1, 0)
        account.write(goodput.RUNNING, goodput.Facts(step=number + 1))
        if boot == "another machine":
            path = tmp_path / goodput.FILE
            path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": str(number)}))
    assert sum(account.sum_seconds().values()) < 60.0
    assert account.restarts == 2
    assert abs(goodput.read(str(tmp_path)).started - real()) < 60.0


def test_a_process_that_trains_no_step_is_no_restart_and_keeps_what_is_known(tmp_path):
    """Covers a stop while compiling, and the same command after the end of the run."""
    for trained, restarts in ((False, 0), (True, 0), (False, 0), (True, 1), (False, 1), (True, 2)):
        account = goodput.Account(str(tmp_path), goodput.Clock())
        before = account.reached
        if trained:
            account.count_steps(before, before + 10, 0)
        rate = 100.0 + before if trained else None
        facts = goodput.Facts(step=account.reached, examples_per_sec=rate)
        account.write(goodput.FINISHED, facts)
        record = goodput.read(str(tmp_path))
        assert (account.restarts, record.restarts) == (restarts, restarts)
    assert (record.facts.step, record.facts.examples_per_sec) == (30, 120.0)


def test_a_process_that_starts_does_not_claim_the_speed_of_an_earlier_one(tmp_path):
    first = goodput.Account(str(tmp_path), goodput.Clock())
    first.count_steps(0, 10, 0)
    first.write(goodput.STOPPED, goodput.Facts(step=10, chips=8, examples_per_sec=1000.0))
    again = goodput.Account(str(tmp_path), goodput.Clock())
    again.write(goodput.RUNNING, goodput.Facts(step=10, chips=4))
    assert goodput.read(str(tmp_path)).facts.examples_per_sec is None
    again.write(goodput.STOPPED, goodput.Facts(step=10))
    assert goodput.read(str(tmp_path)).facts.examples_per_sec == 1000.0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-5", "1e999", '"x"', "[]", "null", "true"])
@pytest.mark.parametrize("field", ["started", "updated", "uptime", "seconds", "restarts", "step"])
def test_any_value_in_an_account_is_survived(field, value, tmp_path):
    account = goodput.Account(str(tmp_path), goodput.Clock())
    account.write(goodput.FAILED, goodput.Facts(step=3))
    record = json.loads((tmp_path / goodput.FILE).read_text())
    record[field] = "VALUE" if field != "seconds" else record["seconds"] | {"step": "VALUE"}
    text = json.dumps(record).replace('"VALUE"', value)
    (tmp_path / goodput.FILE).write_text(text)
    again = goodput.Account(str(tmp_path), goodput.Clock())
    again.write(goodput.RUNNING, goodput.Facts(step=4))
    seconds = goodput.read(str(tmp_path)).seconds
    assert all(0.0 <= s < 1e6 for s in seconds.values())
    assert 0 <= again.reached <= 10


def test_a_damaged_account_is_started_again(tmp_path):
    for damage in (
        '{"state": "runn',
        "[]",
        '{"state": "running"}',
        '{"state": "failed", "step": "x"}',
    ):
        (tmp_path / goodput.FILE).write_text(damage)
        assert goodput.read(str(tmp_path)) is None
        assert goodput.Account(str(tmp_path), goodput.Clock()).restarts == 0


def test_a_record_is_read_as_it_was_written(tmp_path):
    facts = goodput.Facts(step=3, steps=9, global_batch_size=8, chips=2, mfu=0.25)
    account = goodput.Account(str(tmp_path), goodput.Clock())
    account.write(goodput.RUNNING, facts)
    record = goodput.read(str(tmp_path))
    assert record.facts == account.facts == facts
    written = json.loads((tmp_path / goodput.FILE).read_text())
    assert written == record.to_json()
    assert "usd" not in written  # a fact that is not known
    assert goodput.Account(str(tmp_path), goodput.Clock()).reached == 3


@pytest.mark.medium
def test_the_age_of_a_process_agrees_with_another_clock():
    code = (
        "import time; time.sleep(0.5)\n"
        "from tftpu.runtime.goodput import process_age; print(process_age())"
    )
    began = time.monotonic()
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - began
    assert os.path.exists("/proc/self/stat")


def test_the_table_lists_the_largest_part_first_and_omits_empty_ones():
    seconds = dict.fromkeys(goodput.PARTS, 0.0) | {"step": 90.0, "input_wait": 10.0}
    assert [line.split()[0] for line in goodput.format_table(seconds)] == ["step", "input", "total"]
    assert "90.0 s   90.0%" in goodput.format_table(seconds)[0]
    seconds["step"] = 0.01
    assert [line.split()[0] for line in goodput.format_table(seconds)] == ["input", "step", "total"]
