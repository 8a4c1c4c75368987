"""`tftpu status`: the state of runs, from the files of their workdirs."""

import json
import re
import shutil
import subprocess
import sys
import time

import keras
import pytest

from tests.support.models.training import compiled, data, make_trainer
from tests.support.workdirs import held_by_another
from tftpu.config import OptimizerConfig, to_json
from tftpu.launch import main as command_line
from tftpu.launch.commands.finished import status
from tftpu.launch.commands.finished.status import format_status
from tftpu.launch.run import recorded_start, start
from tftpu.launch.settings import config_flags
from tftpu.runtime import goodput
from tftpu.storage import files, locks


def test_the_status_of_a_finished_run_matches_its_files(finished_run):
    record = status.read_status(str(finished_run))
    assert (record["state"], record["step"], record["steps"]) == ("finished", 60, 60)
    assert record["checkpoints"]["steps"][-1] == 60
    written = [json.loads(line) for line in (finished_run / "metrics.jsonl").open()]
    for split in ("train", "eval"):
        last = [line for line in written if line["split"] == split][-1]
        assert record["metrics"][split]["loss"] == last["loss"]
    text = "\n".join(format_status(record))
    assert "process" not in text and "updated " in text  # there is no such process any more
    assert "60/60 (100%)" in text and "finished" in text and "total" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_a_folder_of_runs_stands_for_its_runs(finished_run, tmp_path, capsys):
    account = (finished_run / goodput.FILE).read_bytes()
    for name in ("birds", "ants"):
        files.write_whole(str(tmp_path / name / goodput.FILE), account)
    assert command_line.main(["status", str(tmp_path), str(finished_run)]) == 0
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("/")]
    assert named == [str(tmp_path / "ants"), str(tmp_path / "birds"), str(finished_run)]


def test_fields_in_which_runs_differ_are_listed(finished_run, tmp_path, capsys):
    account = (finished_run / goodput.FILE).read_bytes()
    configs = {"a": {"width": 64, "steps": 300}, "b": {"width": 96}, "c": {"width": 64}}
    for name, model in configs.items():
        files.write_whole(str(tmp_path / name / goodput.FILE), account)
        (tmp_path / name / "config.json").write_text(json.dumps({"model": model, "x": [1]}))
    assert command_line.main(["status", f"{tmp_path}/a", f"{tmp_path}/b"]) == 0
    said = capsys.readouterr().out.splitlines()[-3:]
    assert said[0] == f"Their configs differ ({tmp_path}/a | {tmp_path}/b):"
    assert said[1:] == ["  model.width  64 | 96", "  model.steps  300 | -"]
    assert command_line.main(["status", f"{tmp_path}/c", f"{tmp_path}/c", f"{tmp_path}/c"]) == 0
    assert "differ" not in capsys.readouterr().out


def test_long_values_show_where_they_differ(tmp_path):
    """Whole ones if they are as long as paths, else the part around the first difference."""
    for ahead, said in ("/d" * 40, "/d" * 40 + "{}"), ("/d" * 900, "…" + "d/" * 29 + "d{}"):
        for name in "ab":
            record = {"data": {"data_dir": f"{ahead}/{name}"}}
            files.write_whole(str(tmp_path / name / "config.json"), json.dumps(record).encode())
        *_, line = status.list_differences([f"{tmp_path}/a", f"{tmp_path}/b"])
        assert line == f"  data.data_dir  {said.format('/a')} | {said.format('/b')}"


def test_objects_of_two_classes_differ_in_one_line(tmp_path):
    for name, optimizer in {"a": OptimizerConfig("sgd", 0.1), "b": "adam"}.items():
        experiment = config_flags.load("digits_resnet", [])
        experiment.optimizer = optimizer
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(to_json(experiment))
    *_, line = status.list_differences([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert line.startswith("  optimizer  OptimizerConfig(name=sgd, learning_rate=0.1, ")
    assert line.endswith("… | adam")
    decayed = config_flags.load("digits_resnet", ["--config.optimizer.weight_decay=0.3"])
    decayed.optimizer.name, decayed.optimizer.learning_rate = "sgd", 0.1
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(to_json(decayed))
    *_, line = status.list_differences([f"{tmp_path}/{name}" for name in "acb"])
    assert "weight_decay=0.0" in line and "weight_decay=0.3" in line and "learning_rate" not in line


def test_the_state_follows_the_process_that_holds_the_workdir(finished_run, tmp_path, monkeypatch):
    """The run is running while the lock is held, and crashed once its holder disappears."""
    with locks.locked(str(tmp_path)):
        assert format_status(status.read_status(str(tmp_path)))[1].startswith(
            "  state       starting"
        )
    record = goodput.read(str(finished_run)).to_json()
    record |= {"state": "running", "eta_seconds": 75.0, "step": 30}
    files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
    with held_by_another(tmp_path):
        # An account of an earlier process, which a run that resumes has not replaced yet.
        resuming = status.read_status(str(tmp_path))
        assert resuming["state"] == "starting"
        record["process"] = locks.find_holder(tmp_path).process
        assert format_status(resuming)[-1].split()[:2] == ["process", str(record["process"])]
        files.write_whole(str(tmp_path / "checkpoints/20/manifest.json"), b"{}")
        said = format_status(status.read_status(str(tmp_path)))[-1]
        assert said == "  checkpoint  step 20, from which it resumes"
        shutil.rmtree(tmp_path / "checkpoints")
        files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
        running = status.read_status(str(tmp_path))
        assert running["state"] == "running"
        assert "process     " in "\n".join(format_status(running))
        assert "time left   1:15" in "\n".join(format_status(running))
    crashed = status.read_status(str(tmp_path))
    assert crashed["state"] == "crashed"
    said = "\n".join(format_status(crashed))
    assert "nothing was saved, and the same command starts over" in said and "none yet" in said
    files.write_whole(str(tmp_path / "checkpoints/5/manifest.json"), b"{}")
    said = "\n".join(format_status(status.read_status(str(tmp_path))))
    assert "crashed, was killed, or was stopped at once: the same command resumes it" in said
    files.write_whole(str(tmp_path / "own.py"), b"")
    recorded = json.dumps({"config_file": str(tmp_path / "own.py")})
    files.write_whole(str(tmp_path / "config.json"), recorded.encode())
    monkeypatch.chdir(tmp_path)
    said = "\n".join(format_status(status.read_status(str(tmp_path))))
    assert f"(tftpu train own.py --workdir={tmp_path}, with its other flags)" in said
    recorded_start.write(str(tmp_path), ["--config=own.py", "--config.train.steps=600"])
    said = "\n".join(format_status(status.read_status(str(tmp_path))))
    assert "same command resumes it (tftpu train own.py --config.train.steps=600)" in said
    with locks.locked(str(tmp_path)):  # status leaves no lock behind
        pass


def test_the_step_is_that_of_the_newest_file(finished_run, tmp_path):
    """goodput.json is written every ten seconds, metrics.jsonl at every log line."""
    record = goodput.read(str(finished_run)).to_json() | {"step": 0}
    files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
    files.write_whole(
        str(tmp_path / "metrics.jsonl"), (finished_run / "metrics.jsonl").read_bytes()
    )
    found = status.read_status(str(tmp_path))
    assert found["step"] == 60
    assert format_status(found)[-1].strip() == "as last written, at step 0"


def test_a_run_that_evaluates_says_so_and_has_no_time_left(finished_run, tmp_path):
    """The estimate is as old as goodput.json: the steps logged since then are taken from it."""
    record = goodput.read(str(finished_run)).to_json()
    record |= {"state": "running", "eta_seconds": 60.0, "step": 30, "examples_per_sec": 50.0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 45, "split": "train", "loss": 1.0}\n')
    with held_by_another(tmp_path):
        record["process"] = locks.find_holder(tmp_path).process
        for current, step, said in (
            ("step", 30, "state       running$"),
            ("evaluation", 30, "state       running: evaluating$"),
            ("evaluation", 60, "state       running: evaluating$"),
        ):
            record |= {"current": current, "step": step}
            files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
            text = "\n".join(format_status(status.read_status(str(tmp_path))))
            assert re.search(said, text, re.MULTILINE), text
            assert ("time left   0:30" in text) == (step < 60) == ("time left" in text)
    assert "50 examples/s in the last steps" in text


def test_only_tpus_are_called_chips(finished_run, tmp_path):
    record = goodput.read(str(finished_run)).to_json() | {"chips": 4, "examples_per_sec": 50.0}
    for more, said in ({}, "4 devices\n"), ({"usd": 1.5}, "4 chips\n"):
        files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record | more).encode())
        assert f" on {said}" in "\n".join(format_status(status.read_status(str(tmp_path))))


@pytest.mark.medium
def test_an_evaluation_is_written_when_it_begins(tmp_path):
    seen = set()

    def look(logs=None):
        for _ in range(100):  # a thread writes the file
            time.sleep(0.02)
            seen.add(status.read_status(str(tmp_path))["activity"])
            if "evaluation" in seen:
                return

    trainer = make_trainer(compiled(), tmp_path)
    look_on = keras.callbacks.LambdaCallback()
    look_on.on_test_begin = look
    trainer.fit(data().repeat(), steps=2, validation_data=data(), eval_every=2, callbacks=[look_on])
    assert "evaluation" in seen


def test_a_run_that_was_interrupted_before_its_first_step_is_a_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert command_line.main(["status", str(tmp_path)]) == 0
    assert (
        "before its first step: nothing was saved, and the same command" in capsys.readouterr().out
    )


def test_the_status_of_runs_is_shown_beside_one_that_is_missing(finished_run, capsys):
    assert command_line.main(["status", str(finished_run), "/nowhere"]) == 2
    said = capsys.readouterr()
    assert "60/60" in said.out
    assert "There is no run in '/nowhere'" in said.err


def test_the_folder_of_a_search_is_shown_by_its_report(tmp_path, capsys):
    (tmp_path / "search.json").write_text("{}")
    assert command_line.main(["status", str(tmp_path)]) == 2
    assert f"run `tftpu search --report --workdir={tmp_path}`." in capsys.readouterr().err


def test_status_loads_no_tensorflow_and_prints_json_for_programs(finished_run):
    code = (
        "import sys\nfrom tftpu.launch.main import main\n"
        "code = main(['status', sys.argv[1], '--json'])\n"
        "print(code, 'tensorflow' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished_run)], capture_output=True, text=True
    )
    assert done.stderr.strip() == "0 False"
    assert json.loads(done.stdout)["step"] == 60


INTERRUPTED = """
from tftpu.launch.configs import digits_resnet

class Interrupted(digits_resnet.Images):
    def training(self, context):
        raise KeyboardInterrupt

def get_config():
    LOADING
    experiment = digits_resnet.get_config()
    experiment.data = Interrupted()
    return experiment
"""


@pytest.mark.parametrize("loading", ["raise KeyboardInterrupt", "pass"])
def test_an_early_ctrl_c_has_one_state_whenever_it_comes(loading, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(INTERRUPTED.replace("LOADING", loading))
    workdir = str(tmp_path / "run")
    assert command_line.main(["train", str(tmp_path / "mine.py"), f"--workdir={workdir}"]) == 130
    assert command_line.main(["status", workdir]) == 0
    said = capsys.readouterr().out
    assert "stopped by the user: nothing was saved, and the same command starts over" in said
    assert "0/0" not in said


def test_every_early_stop_is_in_the_account_but_no_other_process_is_overwritten(tmp_path):
    """Gives each record another process number, as if another process had stopped."""
    for number in (1, 2):
        before = goodput.read(str(tmp_path))
        goodput.record_stop(str(tmp_path))
        goodput.record_stop(str(tmp_path))  # again in the same process
        record = goodput.read(str(tmp_path))
        assert record.seconds["starting"] > (before.seconds["starting"] if before else 0) + 0.1
        change = json.dumps(record.to_json() | {"process": -number}).encode()
        files.write_whole(str(tmp_path / goodput.FILE), change)
    with (
        held_by_another(tmp_path),
        pytest.raises(KeyboardInterrupt),
        start._recording_stop(str(tmp_path)),
    ):
        raise KeyboardInterrupt
    assert goodput.read(str(tmp_path)).process == -2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["status"], "needs RUN..."),
        (["status", "/nowhere"], "There is no run in '/nowhere': there is no such folder"),
        (["plot", "/nowhere"], "There are no metrics in '/nowhere'"),
        (["plot", "/nowhere", "--output=x.doc"], ".png, .svg or .pdf"),
        (["profile", "/nowhere"], "There is no profile in '/nowhere'"),
        (["profile", "a", "b", "c"], "compares two runs"),
    ],
)
def test_missing_files_are_reported_as_the_users_mistake(arguments, sentence, capsys):
    assert command_line.main(arguments) == 2
    assert sentence in capsys.readouterr().err
