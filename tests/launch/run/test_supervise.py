"""Restarts after crashes, as long as steps are gained. The children are small programs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import warm
from tftpu.launch import startup
from tftpu.launch.run import supervise
from tftpu.storage import buckets

# Runs a script of words: "save:N" makes a checkpoint, "exit:N" ends, "kill" dies.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
work = Path(sys.argv[1])
lives = json.loads((work / "lives.json").read_text())
life = lives.pop(0)
(work / "lives.json").write_text(json.dumps(lives))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
for word in life:
    name, _, value = word.partition(":")
    if name == "save":
        folder = work / "checkpoints" / value
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")
    elif name == "exit":
        sys.exit(int(value))
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "sleep":
        (work / "asleep").write_text(str(os.getpid()))
        time.sleep(60)
"""
SUPERVISE = (
    "import sys\nfrom tftpu.launch.run import supervise\n"
    "sys.exit(supervise.run([sys.executable, '-c', sys.argv[1], sys.argv[2]], sys.argv[2],"
    " int(sys.argv[3]), first_wait=0.01))"
)


def start(workdir: Path, lives: list[str], restarts: int) -> subprocess.Popen:
    (workdir / "lives.json").write_text(json.dumps([life.split() for life in lives]))
    return warm.Popen(
        [sys.executable, "-c", SUPERVISE, CHILD, str(workdir), str(restarts)],
        stderr=subprocess.PIPE,
        text=True,
    )


def lives_left(workdir: Path) -> int:
    return len(json.loads((workdir / "lives.json").read_text()))


@pytest.mark.medium
def test_a_run_that_gains_steps_is_restarted_until_it_is_done(tmp_path):
    lives = ["exit:255", "save:10 kill", "save:20 exit:124", "save:30 exit:0"]
    process = start(tmp_path, lives, 5)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert lives_left(tmp_path) == 0
    assert "exit code 255; its newest checkpoint is at step 0. Restart 1 of 5" in said
    assert "signal SIGKILL; its newest checkpoint is at step 10. Restart 2 of 5" in said
    assert "exit code 124; its newest checkpoint is at step 20. Restart 3 of 5" in said


def test_a_run_whose_checkpoints_cannot_be_listed_is_restarted(tmp_path, monkeypatch, capsys):
    """The bucket that does not answer may be why it ended."""

    def list_steps(checkpoints):
        raise buckets.UnavailableError("no answer")

    monkeypatch.setattr(supervise.Checkpoints, "list_steps", list_steps)
    code = f"import os, sys; p = {str(tmp_path / 'seen')!r}\n" + (
        "again = os.path.exists(p); open(p, 'w').close(); sys.exit(0 if again else 69)"
    )
    assert supervise.run([sys.executable, "-c", code], str(tmp_path), 2, first_wait=0.01) == 0
    assert "its checkpoints cannot be listed (no answer). Restart 1" in capsys.readouterr().err


def test_a_run_that_gains_no_step_is_not_restarted_again(tmp_path):
    process = start(tmp_path, ["save:10 exit:1", "exit:1", "exit:0"], 9)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert lives_left(tmp_path) == 1
    assert "No step was gained: giving up" in said


def test_restarts_are_limited(tmp_path):
    process = start(tmp_path, ["save:1 exit:1", "save:2 kill", "save:3 exit:0"], 1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert lives_left(tmp_path) == 1
    assert "All 1 restarts are used up" in said


@pytest.mark.parametrize("code", [0, 2, 75])
def test_failures_that_a_restart_cannot_fix_are_not_restarted(code, tmp_path):
    process = start(tmp_path, [f"exit:{code}", "exit:0"], 3)
    assert process.wait(timeout=60) == code
    assert lives_left(tmp_path) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_to_the_run_and_end_the_supervisor(number, tmp_path):
    process = start(tmp_path, ["sleep", "exit:0"], 3)
    end = time.monotonic() + 60
    asleep = tmp_path / "asleep"
    while not (asleep.exists() and asleep.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    code = process.wait(timeout=60)
    assert code == (75 if number == signal.SIGTERM else 128 + signal.SIGINT)
    assert lives_left(tmp_path) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "asleep").read_text()), 0)


@pytest.mark.medium
def test_a_killed_supervisor_takes_its_child_along(tmp_path):
    """Otherwise the child would train on and keep the workdir's lock, and nobody restarts it."""
    process = start(tmp_path, ["sleep", "exit:0"], 3)
    end = time.monotonic() + 60
    asleep = tmp_path / "asleep"
    while not (asleep.exists() and asleep.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    child = psutil.Process(int(asleep.read_text()))
    process.kill()
    process.wait(timeout=60)
    child.wait(timeout=10)
    assert lives_left(tmp_path) == 1


def test_a_supervised_run_imports_modules_of_the_working_directory(tmp_path):
    """Last of all: a folder here that is called tftpu does not replace the package."""
    (tmp_path / "neighbour.py").write_text("print('imported')")
    (tmp_path / "tftpu").mkdir()
    (tmp_path / "tftpu/__init__.py").write_text("raise SystemExit('the wrong tftpu')")
    command = [word.replace("run()", "import neighbour") for word in startup.build_command([])]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("imported\n", "")
