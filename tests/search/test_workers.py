"""Workers that are killed, and workers of several machines: every trial counts once."""

import json
import random
import time

import pytest

from tests.support import gs_proxy
from tests.support.fake_storage import BUCKET
from tests.support.searches import TINY, started, table

KILLS, TRIALS = 10, 6
WORDS = (*TINY, f"--trials={TRIALS}")


def finished(workdir, *words):
    process = started(*WORDS, *words, f"--workdir={workdir}")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_workers_killed_at_random_lose_no_trial_and_run_none_twice(tmp_path):
    """The searches that were killed find what one that was left alone does, number for number."""
    chance, workdir, kills = random.Random(11), tmp_path / "killed", 0
    while kills < KILLS:
        process = started(*WORDS, f"--workdir={workdir}")
        time.sleep(chance.uniform(1.5, 5.0))
        if process.poll() is not None:
            break  # all is over
        process.kill()
        process.communicate()
        kills += 1
    finished(workdir)
    killed = table(str(workdir))
    assert kills >= 5 and len(killed) == TRIALS
    assert [trial["told"] for trial in killed] == [1] * TRIALS
    finished(tmp_path / "alone")
    assert killed == table(str(tmp_path / "alone"))
    for number in range(TRIALS):  # and no step of a trial was trained by two processes at a time
        lines = (workdir / "trials" / f"{number:04d}" / "run" / "metrics.jsonl").open()
        steps = [e["step"] for e in map(json.loads, lines) if e["split"] == "eval"]
        assert steps == sorted(set(steps))


@pytest.mark.slow
def test_two_machines_share_a_search_in_a_bucket(tmp_path):
    """One is killed in the middle: the other runs what it left."""
    with gs_proxy.serving(tmp_path) as (_, environment):
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
    assert [trial["told"] for trial in trials] == [1] * TRIALS
    assert len({tuple(trial["overrides"]) for trial in trials}) == TRIALS
    assert f"{TRIALS} trials of {TRIALS}" in output
