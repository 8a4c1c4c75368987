"""`tftpu plan`: errors, the answer, and a second plan from the journal of the first."""

import json
import os
import re
import signal
import subprocess
import sys
import types

import pytest

from tftpu.errors import UserError
from tftpu.launch.commands.checking import plan
from tftpu.launch.plan.candidates import Space
from tftpu.launch.settings import config_flags

PLAN = ("plan", "python_gpt")
COMMAND = [sys.executable, "-m", "tftpu.launch.main", *PLAN]


def run(folder, *flags):
    return subprocess.run(
        [*COMMAND, *flags, f"--workdir={folder}"], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.compiles
def test_a_plan_compiles_once_and_prints_the_command(tmp_path):
    flags = ["--slices=v5e-1", "--config.model.attention=plain", f"--json={tmp_path / 'a.json'}"]
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    command = "tftpu train python_gpt --config.model.attention=plain --config.cluster.mesh=data:1"
    # Another may have its verdict before that of the first ends the search.
    counts = re.search(r"24 candidates: ([12]) compiled, (\d+) pruned, 0 left\.", done.stdout)
    assert command in done.stdout and counts and sum(map(int, counts.groups())) == 24
    answer = json.loads((tmp_path / "a.json").read_text())
    best = answer["best"][0]
    assert best["usd"] == pytest.approx(600 * best["step_seconds"] * 1.20 / 3600)
    assert best["step_seconds_low"] < best["step_seconds"] < best["step_seconds_high"]
    assert 0.05 < best["mfu"] < 0.2  # small products fill little of the matrix units
    again = run(tmp_path, *flags, "--budget=0.0001")
    assert again.returncode == 2 and "compiling" not in again.stderr
    assert "over budget" in again.stdout


@pytest.mark.slow
def test_a_mesh_that_cannot_divide_the_model_is_left_out(tmp_path):
    command = [*COMMAND[:-1], "digits_resnet", "--slices=v5e-4", "--time_limit=1s"]
    for _ in ("measured", "known"):
        done = subprocess.run(
            [*command, f"--workdir={tmp_path}"], capture_output=True, text=True, check=False
        )
        assert (
            "3 meshes left out: Most layers are convolutions, whose communication along"
            in done.stdout
        )
        assert done.returncode == 2 and "0 compiled" in done.stdout
    assert len((tmp_path / "plan.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.compiles
def test_an_interrupted_plan_says_what_it_knows(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--slices=v5e-1", f"--workdir={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TFTPU_CACHE": str(tmp_path)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("compiling"):
            break
    process.send_signal(signal.SIGTERM)  # of `timeout`, and answered like a Ctrl-C
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    advice = "give more time with --time_limit, or fewer candidates with --config.model."
    assert f"No candidate that fits is known yet: {advice}attention=auto.\n" in said
    assert (
        "54 candidates: 0 compiled, 0 pruned, 54 left: the same command continues with them, for "
        in said
    )


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_a_journal_that_is_no_file_is_an_error_that_asks_for_another_folder(kind, tmp_path):
    path = tmp_path / "plan.jsonl"
    path.mkdir() if kind == "folder" else path.symlink_to(tmp_path / "gone")
    options = plan.Options(config="python_gpt", workdir=str(tmp_path))
    space = Space(config_flags.load("python_gpt", []))
    says = r"plan\.jsonl cannot be used \(it is not a regular file\): give another folder with"
    with pytest.raises(UserError, match=says):
        plan._open_journal(options, space)


def test_the_command_for_a_run_names_its_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    experiment = types.SimpleNamespace()
    space = types.SimpleNamespace(
        experiment=experiment, list_changes=lambda _: ["cluster.mesh=data:1"]
    )
    for run, file, config, parts in (
        ("runs/a", "mine.py", "mine.py", "flags"),
        ("runs/b", "gone.py", "CONFIG", "config and the flags"),
        ("runs/python_gpt", "", "python_gpt", "config and the flags"),
        ("runs/c", "", "CONFIG", "config and the flags"),
    ):
        (tmp_path / run).mkdir(parents=True)
        experiment.config_file = file and str(tmp_path / file)
        recorded = json.dumps({"config_file": experiment.config_file})
        for name in ("config.json", "goodput.json"):
            (tmp_path / run / name).write_text(recorded)
        lines = plan._list_command(plan.Options(config=run), None, space)
        assert lines[0] == f"  tftpu train {config} --config.cluster.mesh=data:1"
        assert lines[1] == f"  with the {parts} that the run was trained with"
    best = types.SimpleNamespace(slice="v5e-1")
    lines = plan._list_command(plan.Options(config="python_gpt"), best, space)
    assert lines == [
        "  tftpu train python_gpt --config.cluster.mesh=data:1",
        "  tftpu preflight python_gpt --config.cluster.mesh=data:1 --slices=v5e-1",
    ]
