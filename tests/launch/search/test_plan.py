"""The plan of a search, and a config that changed since: it is not mixed with the earlier one."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from optuna.trial import TrialState

from tests.support import warm
from tftpu.errors import UserError
from tftpu.launch import main
from tftpu.launch.search import plan as plans
from tftpu.launch.search.trials import Trials
from tftpu.launch.settings import config_flags

OWN = """
from tftpu.launch.configs.digits_resnet import get_config as digits


def get_config():
    experiment = digits()
    experiment.model.width = {}
    return experiment
"""


def complete(plan, workdir):
    """Records a plan, and a trial that is complete."""
    plans.record(plan, workdir)
    study = plan.open_study(workdir)
    trial = study.ask()
    trial.set_user_attr("overrides", ["--config.optimizer.momentum=0.5"])
    study.tell(trial, 0.5)


def planned(config, **fields):
    known = {"overrides": (), "space": ("optimizer.momentum=uniform:0..1",), "metric": "accuracy"}
    config = str(config)
    found = plans.extract_fields(config_flags.load(config, list(fields.get("overrides", ()))))
    return plans.Plan(**{**known, "config": config, "fields": found, **fields})


@pytest.fixture
def own(tmp_path):
    """Returns a config file and the workdir of its search, in which a trial is complete."""
    config, workdir = tmp_path / "own.py", str(tmp_path / "search")
    config.write_text(OWN.format(32))
    complete(planned(config), workdir)
    return config, workdir


def rewrite(config: Path, text: str) -> None:
    """Changes a file as people do: later than in the second in which Python compiled it."""
    config.write_text(text)
    later = config.stat().st_mtime + 2
    os.utime(config, (later, later))


def test_a_plan_is_read_as_it_was_written(own):
    config, workdir = own
    assert plans.read_recorded(workdir) == planned(config)


def test_a_search_whose_config_changed_is_not_continued(own, capsys):
    config, workdir = own
    rewrite(config, OWN.format(16))
    words = ("search", f"--config={config}", f"--workdir={workdir}")
    assert main.main([*words, "--space=optimizer.momentum=uniform:0..1"]) == 2
    assert "differs in config: model.width was 32 and is 16" in capsys.readouterr().err
    assert main.main(["search", "--join", f"--workdir={workdir}"]) == 2
    said = capsys.readouterr().err
    assert "is not the config of the search" in said and "model.width was 32 and is 16" in said
    assert main.main(["search", "--report", f"--workdir={workdir}"]) == 0
    assert "not that of the search any more: model.width was 32" in capsys.readouterr().err


def test_a_search_is_joined_with_its_own_config_only_wherever_that_is(own, tmp_path, capsys):
    _, workdir = own
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "own.py"
    other.write_text(OWN.format(8))
    assert main.main(["search", "--join", f"--config={other}", f"--workdir={workdir}"]) == 2
    assert "model.width was 32 and is 8" in capsys.readouterr().err
    other.write_text(OWN.format(32))
    plan, before = planned(other), plans.read_recorded(workdir)
    assert plan.config != before.config and not plans.describe_differences(
        before.fields, plan.fields
    )
    assert plans.record(plan, workdir) == ""


def test_what_a_machine_has_of_its_own_is_no_difference():
    kinds = ("--config.data.cache_dir=/x", "--config.data.global_batch_size=512")
    one, *others = (
        plans.extract_fields(config_flags.load("resnet50_imagenet", list(changes)))
        for changes in ((), kinds[:1], kinds)
    )
    assert plans.describe_differences(one, others[0]) == ""
    assert "data.global_batch_size" in plans.describe_differences(one, others[1])


def test_a_search_continues_with_overrides_that_change_no_number(tmp_path):
    config, workdir = "resnet50_imagenet", str(tmp_path)
    complete(planned(config), workdir)
    later = planned(config, overrides=("--config.data.max_bad_records=7",))
    assert plans.record(later, workdir) == ""
    assert "--config.data.max_bad_records=7" in plans.read_recorded(workdir).build_arguments(
        [], "run"
    )
    other = planned(config, overrides=("--config.data.shuffle=7",))
    with pytest.raises(plans.UserError, match=r"differs in config: data\.shuffle was 16384"):
        plans.record(other, workdir)


def test_the_metric_is_compared_before_what_follows_from_it(tmp_path):
    complete(planned("digits_resnet"), str(tmp_path))
    other = planned("digits_resnet", metric="loss", overrides=("--config.train.seed=3",))
    with pytest.raises(plans.UserError, match="differs in metric: 'accuracy', not 'loss'"):
        plans.record(other, str(tmp_path))
    assert "--config.train.best_metric=loss" in other.build_arguments([], "run")


@pytest.mark.parametrize("state", [TrialState.FAIL, TrialState.PRUNED, None])
def test_only_a_search_whose_trials_all_failed_gives_way_to_another(tmp_path, state):
    workdir, plan, other = (
        str(tmp_path),
        planned("digits_resnet"),
        planned("digits_resnet", metric="loss"),
    )
    plans.record(plan, workdir)
    study = plan.open_study(workdir)
    for end in (TrialState.FAIL, state):
        trial = study.ask()
        if end is not None:
            study.tell(trial, state=end)
    (tmp_path / "trials" / "0000" / "run").mkdir(parents=True)
    if state == TrialState.FAIL:
        assert plans.record(other, workdir).startswith("2 trials of an earlier search")
        assert other.open_study(workdir).get_trials() == [] and not (tmp_path / "trials").exists()
        assert plans.read_recorded(workdir) == other
    else:
        with pytest.raises(plans.UserError, match="differs in metric"):
            plans.record(other, workdir)
        assert len(plan.open_study(workdir).get_trials()) == 2


def test_a_search_that_was_replaced_before_its_first_trial_ends(tmp_path):
    """Two searches start in one workdir: the one that is replaced runs nothing in the other's."""
    workdir = str(tmp_path)
    plan, other = planned("digits_resnet"), planned("digits_resnet", metric="loss")
    plans.record(plan, workdir)
    study = plan.open_study(workdir)
    trials = Trials(plan, workdir, study, ())
    assert plans.record(other, workdir) == "an earlier search, which had begun no trial"
    with pytest.raises(UserError, match=r"replaced by another while it ran \(metric: 'loss', not"):
        trials.claim_next_trial(set())
    later = other.open_study(workdir)
    assert later.get_trials() == []
    assert Trials(other, workdir, later, ()).claim_next_trial(set()).trial.number == 0
    with pytest.raises(UserError, match="differs in metric"):
        plans.record(plan, workdir)
    # The later search's trial looks abandoned to the first one.
    with pytest.raises(UserError, match="replaced by another while it ran"):
        Trials(plan, workdir, later, ()).claim_next_trial(set())


@pytest.mark.medium
def test_a_plan_is_recorded_after_one_that_another_process_records(tmp_path):
    code = (
        "import json, sys\n"
        "from tftpu.launch.search import plan as plans\n"
        "workdir, fields = sys.argv[1], json.loads(sys.argv[2])\n"
        "with plans.lock_study(workdir):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    plan = plans.Plan(**fields)\n"
        "    plans.record(plan, workdir)\n"
        "    plan.open_study(workdir).ask()\n"
    )
    first, workdir = planned("digits_resnet"), str(tmp_path)
    words = [sys.executable, "-c", code, workdir, json.dumps(dataclasses.asdict(first))]
    with warm.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        threading.Timer(0.5, lambda: print(file=process.stdin, flush=True)).start()
        with pytest.raises(UserError, match="a search that differs in metric"):
            plans.record(planned("digits_resnet", metric="loss"), workdir)
        assert plans.record(dataclasses.replace(first, trials=3), workdir) == ""
    assert plans.read_recorded(workdir).trials == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trials": "five"}, "trials is 'five'"),
        ({"trials": 0}, "trials is 0"),
        ({"overrides": "none"}, "overrides is 'none', not a list"),
        ({"space": [1]}, "space is (1,)"),
        ({"fields": []}, "fields is []"),
        ({"sampler": "tp"}, "choose tpe"),
        ({"more": 1}, "more"),
        ({"slice": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_damaged_plan_is_named(tmp_path, capsys, change, said):
    plans.record(planned("digits_resnet"), str(tmp_path))
    file = tmp_path / plans.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main.main(["search", "--report", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "search.json is not a search's plan" in error and said in error


@pytest.mark.parametrize("flag", ["--trials=20", "--sampler=tpe", "--seed=0", "--pruner=median"])
def test_a_flag_that_repeats_a_default_is_refused_like_any_other(own, capsys, flag):
    _, workdir = own
    for what in ("--report", "--join"):
        assert main.main(["search", what, flag, f"--workdir={workdir}"]) == 2
        assert f"{flag.split('=')[0]} cannot change: leave" in capsys.readouterr().err


def test_the_record_of_a_search_gives_its_trials_no_other_flags(own, tmp_path, capsys, monkeypatch):
    config, workdir = own
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    study = planned(config).open_study(workdir)
    study.ask().set_user_attr("overrides", [f"--config={program}"])
    trials = Trials(planned(config), workdir, study, ())
    with pytest.raises(UserError, match=f"record contains '--config={program}'"):
        trials.claim_next_trial(set())
    path = Path(workdir, plans.FILE)
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"overrides": [f"--config={program}"]}))
    assert main.main(["search", "--report", f"--workdir={workdir}"]) == 2
    path.write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert main.main(["search", "--report", f"--workdir={workdir}"]) == 2
    assert f"the config {config}, which is code. If you trust it" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
