"""Searches that an error, a lost worker or a budget ends in the middle."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import warm
from tests.support.searches import TINY, result, started, table
from tftpu.launch.commands.training import search
from tftpu.launch.search import plan as plans
from tftpu.launch.settings.parsing import parse
from tftpu.storage import locks

# Each begins a program that then runs the command line.
FULL_DISK = """
import optuna
def refuse(*_):
    raise OSError(28, "No space left on device")
optuna.Trial.report = refuse
"""
PRICED = """
from tftpu.launch.search import pricing
pricing.check = lambda: None
pricing.price = lambda *_: pricing.Price(0.4)
"""


def with_changes(program, *words):
    """Returns the exit code and the output of a command, in a process with changes."""
    done = warm.run(
        [sys.executable, "-c", f"{program}\nfrom tftpu.launch.main import run\nrun()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        start_new_session=True,
        env=os.environ,
    )
    return done.returncode, done.stdout


def finished(*words):
    process = started(*words)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_reported_ends_the_search_and_its_processes(tmp_path):
    words = (*TINY, "--trials=2", f"--workdir={tmp_path}")
    code, output = with_changes(FULL_DISK, *words)
    assert code == 2 and "The disk is full" in output, output
    assert "2 of 2" not in output and "1 trial of 2" in output
    assert locks.is_locked(tmp_path / "trials" / "0000" / "run") is False
    assert table(str(tmp_path))[0]["told"] == 0
    assert "trial 0   again" in finished(*words)
    assert len(table(str(tmp_path))[0]["reports"]) == 4


@pytest.mark.slow
def test_a_run_that_fell_behind_when_its_worker_was_lost_trains_no_further(tmp_path):
    """Cut between an evaluation and its answer: the run has saved, and the study knows nothing."""
    words = (*TINY, "--trials=6", f"--workdir={tmp_path}")
    plan, _ = search._build_plan(parse("search", search.Options, words[1:]))
    plans.record(plan, str(tmp_path))
    study = plan.open_study(str(tmp_path))
    for number in range(5):
        trial = study.ask()
        trial.set_user_attr("overrides", [f"--config.optimizer.learning_rate=0.{number + 1}"])
        for evaluation in (1, 2, 3, 4):
            trial.report(0.99, evaluation)
        study.tell(trial, 0.99)
    drawn, run = ["--config.optimizer.learning_rate=0.001"], tmp_path / "trials" / "0005" / "run"
    study.ask().set_user_attr("overrides", drawn)
    finished("train", *plan.build_arguments(drawn, str(run)), "--config.train.steps=10")
    (run / "result.json").unlink()
    assert "pruned after 10 steps" in finished(*words)
    last = table(str(tmp_path))[5]
    assert (last["state"], list(last["reports"])) == (2, [1, 2])
    assert result(tmp_path, 5)["steps"] == 10
    assert "Pruned after evaluation 2." in (tmp_path / "logs" / "0005.log").read_text()


@pytest.mark.slow
def test_a_budget_ends_a_search_and_a_larger_one_continues_it(tmp_path):
    words = (*TINY, "--config.train.steps=5", "--trials=4", f"--workdir={tmp_path}")
    words += ("--slice=v5e-8",)
    code, output = with_changes(PRICED, *words, "--budget_usd=1")
    assert code == 0 and "the next trial exceeds the budget of $1.00" in output, output
    assert [trial["told"] for trial in table(str(tmp_path))] == [1, 1, 0]
    code, output = with_changes(PRICED, *words, "--budget_usd=2")
    assert code == 0 and "trial 2   again" in output and "$1.60 on v5e-8" in output, output
    assert [trial["told"] for trial in table(str(tmp_path))] == [1] * 4
    assert json.loads((tmp_path / "search.json").read_text())["budget_usd"] == 2
