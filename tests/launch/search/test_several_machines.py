"""Workers that are killed, and workers of several machines: every trial counts once."""

import json
import random
import signal
import threading

import pytest

from tests.support.fakes import gs_proxy
from tests.support.fakes.fake_storage import BUCKET
from tests.support.searches import TINY, started, table

TRIALS = 12
WORDS = (*TINY, f"--trials={TRIALS}")
COMPLETE, PRUNED = 1, 2  # as the journal writes them


def finished(workdir, *words):
    process = started(*WORDS, *words, f"--workdir={workdir}")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    return output


def killed_within_a_trial(workdir, chance):
    """Starts a search, and kills it at a random moment of its first trial or at its end."""
    process = started(*WORDS, f"--workdir={workdir}")
    later = threading.Timer(chance.uniform(0.5, 5.0), process.kill)
    begun = 0
    for line in process.stdout:
        begun += "begins  " in line or "again  " in line
        if begun == 1 and later.ident is None:
            later.start()
        elif begun == 2:
            process.kill()
            break
    later.cancel()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [3, 10])
def test_workers_killed_at_random_lose_no_trial_and_run_none_twice(tmp_path, kills):
    """The searches that were killed find what one that was left alone does, number for number."""
    chance, workdir = random.Random(11), tmp_path / "killed"
    for _ in range(kills):  # of more trials: each time, one of them ends at most
        killed_within_a_trial(workdir, chance)
    finished(workdir)
    killed = table(str(workdir))
    assert [trial["told"] for trial in killed] == [1] * TRIALS
    states = [trial["state"] for trial in killed]
    assert states.count(COMPLETE) >= 4 and states.count(PRUNED) >= 2
    finished(tmp_path / "alone")
    assert killed == table(str(tmp_path / "alone"))
    for number in range(TRIALS):  # and no step of a trial was trained by two processes at a time
        lines = (workdir / "trials" / f"{number:04d}" / "run" / "metrics.jsonl").open()
        steps = [e["step"] for e in map(json.loads, lines) if e["split"] == "eval"]
        assert steps == sorted(set(steps))


@pytest.mark.slow
def test_two_machines_share_a_search_in_a_bucket(tmp_path):
    """One is killed in the middle: the other runs what it left. Logs stay in the bucket."""
    with gs_proxy.serving(tmp_path) as (service, environment):
        workdir = f"gs://{BUCKET}/search"
        first = started(*WORDS, f"--workdir={workdir}", environment=environment)
        assert "trial 0" in first.stdout.readline()
        join = ("search", "--join", f"--workdir={workdir}")
        second = started(*join, environment=environment)
        while "begins" not in second.stdout.readline():
            assert second.poll() is None
        first.kill()
        first.communicate()
        output = second.communicate(timeout=500)[0]
        assert second.returncode == 0, output
        with gs_proxy.fake_storage.in_this_process(environment):
            trials = table(workdir)
        logs = {f"search/trials/{number:04d}/log" for number in range(TRIALS)}
        assert logs <= service.names()
        assert b"tftpu train digits_resnet" in service.content("search/trials/0003/log")
    assert [trial["told"] for trial in trials] == [1] * TRIALS
    assert len({tuple(trial["overrides"]) for trial in trials}) == TRIALS
    assert f"{TRIALS} trials of {TRIALS}" in output
