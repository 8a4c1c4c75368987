"""A worker and its trials: how they end, errors, other workers, prices. Processes are played."""

import json
import threading
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tftpu.errors import UserError
from tftpu.launch.search import pricing, space, worker
from tftpu.launch.search.child import HELD, PRUNE
from tftpu.launch.search.logs import Logs
from tftpu.launch.search.plan import Plan
from tftpu.launch.search.trials import OVERRIDES, USD, Trials
from tftpu.launch.search.worker import Workers
from tftpu.launch.settings import config_flags
from tftpu.storage import locks

RATES = ("optimizer.learning_rate=log:1e-4..1",)
ENDED = [(1, 0.5, False), (2, 0.7, True)]  # the messages of a run of two evaluations


class Played:
    """A trial's process that sends messages and ends; also its connection."""

    def __init__(self, messages, code, at_recv=lambda: None):
        self.messages, self.code, self.at_recv = list(messages), code, at_recv
        self.answers, self.events = [], []
        self.connection = self

    def start(self, words, run, metric, log):
        Path(log).write_text("one line\nand the last one\n")
        self.run, self.worker = Path(run), str(Path(run).parent / "worker")
        return self

    def recv(self):
        self.at_recv()
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)

    def send(self, answer):
        self.answers.append(answer)

    def ask_to_stop(self):
        self.events.append("asked")

    def close(self):
        self.events.append("closed" if locks.find_lock(self.worker) else "closed without a claim")

    def wait(self):
        if not self.code:
            found = {"steps": 20, "evaluation": {}}
            found["best"] = {"step": 20, "metric": "accuracy", "value": 0.7}
            self.run.mkdir(parents=True, exist_ok=True)
            (self.run / "result.json").write_text(json.dumps(found))
        return self.code


class Search:
    """A search in a folder, whose processes are played one after another."""

    def __init__(self, workdir, monkeypatch, **fields):
        known = {"config": "digits_resnet", "overrides": (), "space": RATES, "fields": {}}
        self.plan = Plan(**{**known, "metric": "accuracy", "trials": 1, **fields})
        self.workdir, self.said = str(workdir), []
        self.study = self.plan.open_study(self.workdir)
        dimensions = space.parse(RATES, config_flags.load("digits_resnet", []))
        self.trials = Trials(self.plan, self.workdir, self.study, dimensions)
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(worker, "_POLL_S", 0.01)

    def run(self, *played):
        order = list(played)
        made = lambda *arguments: order.pop(0).start(*arguments)  # noqa: E731
        self.monkeypatch.setattr(worker, "TrialProcess", made)
        with Logs(self.workdir) as logs:
            Workers(self.plan, self.study, self.trials, logs, self.said.append).run(1)
        assert not order

    @property
    def states(self):
        return [trial.state for trial in self.study.get_trials()]

    def done(self, count, reports):
        """Adds trials that are complete."""
        for _ in range(count):
            trial = self.study.ask()
            for number, value in reports.items():
                trial.report(value, number)
            self.study.tell(trial, max(reports.values()))

    def left_behind(self, evaluations):
        """Adds a trial whose worker was killed after its run wrote evaluations."""
        trial = self.study.ask()
        trial.set_user_attr(OVERRIDES, ["--config.optimizer.learning_rate=0.5"])
        run = Path(self.trials.resolve_workdir(trial.number))
        run.mkdir(parents=True)
        lines = [
            {"step": 5 * number, "split": "eval", "accuracy": value}
            for number, value in enumerate(evaluations, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return trial


@pytest.fixture
def search(tmp_path, monkeypatch):
    return lambda **fields: Search(tmp_path, monkeypatch, **fields)


def test_a_trial_is_told_with_its_evaluations_and_the_value_of_its_run(search):
    one, played = search(), Played(ENDED, 0)
    one.run(played)
    (trial,) = one.study.get_trials()
    assert (trial.value, trial.intermediate_values) == (0.7, {1: 0.5, 2: 0.7})
    assert played.answers == ["", ""] and played.events == ["closed"]


def test_an_error_ends_the_process_of_a_trial_before_its_claim_is_released(search, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(optuna.Trial, "report", refuse)
    one, played = search(), Played(ENDED, 0)
    with pytest.raises(OSError, match="No space left"):
        one.run(played)
    assert played.events == ["closed"]
    assert one.states == [TrialState.RUNNING]  # the same command resumes it


def test_a_run_that_another_process_still_saves_is_tried_again(search):
    one = search()
    one.run(Played([HELD], 2), Played(ENDED, 0))
    assert one.states == [TrialState.COMPLETE]
    assert any("another process still saves its run" in line for line in one.said)


@pytest.mark.parametrize("code", [0, 2])
def test_a_trial_that_another_worker_has_ended_is_left_to_it(search, code):
    one = search()
    others = one.plan.open_study(one.workdir)

    def end_it():
        if not others.get_trials()[0].state.is_finished():
            others.tell(0, 0.25)

    one.run(Played([], code, end_it) if code else Played([(2, 0.7, True)], 0, end_it))
    assert one.study.get_trials()[0].value == 0.25
    assert any("another worker has taken it over" in line for line in one.said)


def test_a_worker_that_lost_its_claim_tells_nothing(search):
    one = search()

    def take_over():
        folder = Path(one.trials.resolve_folder(0)) / "worker"
        if folder.exists():
            folder.rename(folder.with_name("gone"))

    one.run(Played([(1, 0.5, False)], 2, take_over), Played(ENDED, 0))
    assert one.states == [TrialState.COMPLETE]
    assert sum("another worker has taken it over" in line for line in one.said) == 1


def test_a_decision_that_was_lost_with_the_worker_is_made_before_the_next_step(search):
    one, played = search(trials=6), Played([(2, None, False)], 0)
    one.done(5, {1: 0.9, 2: 0.95})
    one.left_behind([0.1, 0.2])
    one.run(played)
    assert played.answers == [PRUNE]
    assert one.states[5] == TrialState.PRUNED
    assert one.study.get_trials()[5].intermediate_values == {1: 0.1, 2: 0.2}


def test_a_run_that_is_not_behind_or_not_evaluated_goes_on(search):
    one, played = search(trials=6), Played([(2, None, False), (2, 0.7, True)], 0)
    one.done(5, {1: 0.2, 2: 0.6})
    one.left_behind([0.1])  # its second evaluation was not done
    one.run(played)
    assert played.answers[0] == ""
    assert one.states[5] == TrialState.COMPLETE


def test_a_run_without_an_evaluation_failed(search):
    one = search()
    one.run(Played([], 0))
    assert one.states == [TrialState.FAIL]
    log = f"{one.workdir}/logs/0000.log"
    assert f"trial 0   failed: no evaluation reported accuracy. See {log}." in one.said


def test_failures_end_a_search_without_success_and_no_other(search):
    one = search(trials=9)
    with pytest.raises(UserError, match=r"3 trials failed and none is complete.*the last one"):
        one.run(*[Played([], 1) for _ in range(3)])
    assert one.states == [TrialState.FAIL] * 3
    one.done(1, {1: 0.5})
    one.run(*[Played([], 1) for _ in range(5)])
    assert one.states.count(TrialState.FAIL) == 8


def test_a_trial_without_a_price_is_tried_again(search, monkeypatch):
    def crash(*_):
        raise pricing.CannotRunError("preflight ended with exit code 1")

    one = search(slice="v5e-8")
    monkeypatch.setattr(pricing, "price", crash)
    Path(one.workdir, "logs").mkdir(parents=True)
    Path(one.workdir, "logs", "0000.log").write_text("MemoryError\n")
    with pytest.raises(UserError, match=r"exit code 1: MemoryError.*0000.log.*tries it again"):
        one.run()
    assert one.states == [TrialState.RUNNING]


def test_a_trial_is_priced_once(search, monkeypatch):
    one = search(slice="v5e-8", budget_usd=1.0)
    one.left_behind([]).set_user_attr(USD, 0.75)
    monkeypatch.setattr(pricing, "price", lambda *_: pytest.fail("priced again"))
    one.run(Played(ENDED, 0))
    assert one.states == [TrialState.COMPLETE]


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (1, pricing.CannotRunError)])
def test_preflight_that_refuses_a_config_is_told_from_one_that_cannot_run(
    tmp_path, monkeypatch, code, kind
):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(pricing.sys, "executable", str(program))
    with pytest.raises(UserError, match=f"exit code {code}") as refused:
        pricing.price([], "v5e-8", str(tmp_path / "log"), threading.Event())
    assert type(refused.value) is kind


def test_a_machine_without_the_compiler_is_refused_before_anything_is_priced(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'tftpu: libtpu is not installed.' >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(pricing.sys, "executable", str(program))
    with pytest.raises(UserError, match="--slice needs preflight: libtpu is not installed"):
        pricing.check()
