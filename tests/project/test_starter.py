"""The project of `tftpu init` works from a virtual environment that has only the wheel."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest

from tests.support.repository import checkout, wheels
from tftpu.launch import starter
from tftpu.launch.main import main

SECONDS = 900


class Project:
    """A starter project, and the environment that it runs in."""

    def __init__(self, folder: Path):
        self.bin = wheels.install(wheels.build(folder), folder / "venv").parent
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.folder = self.scratch / "flowers"

    def run(self, *words: str, folder: Path | None = None) -> str:
        """Runs a program of the environment in the project; returns what it prints."""
        done = subprocess.run(
            [self.bin / words[0], *words[1:]],
            cwd=folder or self.folder,
            env=wheels.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    made = Project(tmp_path_factory.mktemp("starter"))
    said = made.run("tftpu", "init", "flowers", folder=made.scratch)
    assert said.endswith("Try:  cd flowers; tftpu train flowers.py\n")
    where = made.run("python", "-c", "import tftpu; print(tftpu.__file__)")
    assert str(made.bin.parent) in where  # the wheel's, not this checkout's
    made.run("tftpu", "train", "flowers.py", "--config.train.epochs=4")
    return made


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_it_trains_evaluates_and_exports(project):
    lines = (project.folder / "runs/flowers/metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["split"] == "eval"][-1]
    assert last["step"] == 120
    assert last["accuracy"] > 0.8  # a third would be chance
    said = project.run("tftpu", "evaluate", "runs/flowers")
    assert re.match(r"step \d+  loss [\d.]+  accuracy 0\.[89]", said)
    project.run("tftpu", "export-weights", "runs/flowers", "--output=w.weights.h5")
    stack = [keras.Input((16, 16, 1))]
    for filters in (16, 32, 64):
        stack.append(keras.layers.Conv2D(filters, 3, strides=2, padding="same"))
        stack.append(keras.layers.Activation("relu"))
    model = keras.Sequential([*stack, keras.layers.Flatten(), keras.layers.Dense(3)])
    model.load_weights(project.folder / "w.weights.h5")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_its_own_tests_pass(project):
    said = project.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "3 passed" in said


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_it_is_compiled_for_a_slice(project):
    pytest.importorskip("libtpu", reason="no TPU compiler here: pip install 'tftpu[preflight]'")
    project.run("tftpu", "preflight", "flowers.py", "--slices=v5e-4")
    report = json.loads((project.folder / "runs/flowers/preflight.json").read_text())
    (found,) = report["slices"]
    assert (found["slice"], found["fits"]) == ("v5e-4", True)


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS)
def test_every_other_command_takes_its_config(project):
    project.run("tftpu", "status", "runs/flowers")
    project.run("tftpu", "plot", "runs/flowers")
    project.run("tftpu", "config", "show", "flowers.py")
    project.run("tftpu", "data", "check", "--config=flowers.py")
    said = project.run(
        *("tftpu", "bench", "--config=flowers.py", "--config.train.log_every=2"),
        *("--config.train.steps=100", "--config.train.steps_per_loop=1", "--compare"),
    )
    assert "keras fit" in said
    flags = ("--config.train.profile=5:8", "--config.train.steps=10", "--workdir=runs/profiled")
    project.run("tftpu", "train", "--config=flowers.py", *flags)
    assert "steps on CPU" in project.run("tftpu", "profile", "runs/profiled")


@pytest.mark.parametrize("name", ["model", "keras", "2nd", "a-b"])
def test_a_name_that_cannot_be_a_config_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 2
    assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "flowers"]) == 0
    Path("flowers/model.py").write_text("mine")
    capsys.readouterr()
    assert main(["init", "flowers"]) == 2
    said = capsys.readouterr().err
    assert "flowers exists already: give another name, such as flowers_2. To train on a" in said
    assert Path("flowers/model.py").read_text() == "mine"


def test_its_files_are_formatted_and_linted_as_ours(tmp_path):
    """With our rules, but as a project in which tftpu is a package of others."""
    for path, text in starter.render_files("flowers").items():
        (tmp_path / path).write_text(text)
    rules = tomllib.loads((checkout.ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    ours = ["--isolated", "--no-cache", f"--config=line-length={rules['line-length']}"]
    select = f"--select={','.join(rules['lint']['select'])}"
    for words in (["check", select, *ours], ["format", "--check", *ours]):
        command = [sys.executable, "-m", "ruff", *words, "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_its_config_loads_without_tensorflow_and_is_valid(tmp_path):
    for path, text in starter.render_files("flowers").items():
        (tmp_path / path).write_text(text)
    code = (
        "import sys\nfrom tftpu.launch.settings import config_flags\n"
        "config_flags.load('flowers.py', ['--config.model.width=8']).validate()\n"
        "print({'keras', 'tensorflow'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("where", ["tpu-vm", "vertex"])
def test_both_launchers_would_send_its_code(project, where):
    """Also after a run: neither `runs/` nor caches travel, and no package is missing."""
    words = ("--config=flowers.py", "--slice=v5e-4", "--dry_run")
    said = project.run("tftpu", "launch", where, *words)
    shown = set(re.findall(r"^#   (\S+)  [\d,.]+ (?:bytes|kB)\n", said, re.M))
    assert shown == {".gitignore", *starter.render_files("flowers")}
    assert f"code.tar.gz is {project.folder}, " in said
    assert re.search(r"^#   tftpu-.*-py3-none-any\.whl  .*  sha256 [0-9a-f]{64}$", said, re.M)
