"""The warning of code that has changed since its run was trained."""

import json
import sys
import types

import pytest

from tftpu.config import Experiment, OptimizerConfig
from tftpu.input_pipelines.sources import Tokens
from tftpu.launch.preflight import known_reports
from tftpu.launch.run import recorded_start, training
from tftpu.models.sizes import GPT

_MODEL = '''"""A model."""

WIDTH = 8  # of its layer


def get_config():
    return WIDTH, 20
'''
FLAGS = ["--config=own.py", "--workdir=runs/a b", "--config.train.steps=600"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A workdir with the digests of two loaded files: their paths."""
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "mine.py", tmp_path / "helper.py"
    for path in found:
        path.write_text(_MODEL)
    loaded = [str(path) for path in (*found, tmp_path / "extension.so", tmp_path / "gone.py")]
    monkeypatch.setattr(known_reports, "list_own_code", lambda: loaded)
    recorded_start.write(str(tmp_path / "run"), FLAGS)
    return found


def test_files_that_compute_something_else_are_named(files):
    assert recorded_start.describe_changes("run") == ""
    files[1].write_text(_MODEL.replace("WIDTH = 8", "WIDTH = 16"))
    assert recorded_start.describe_changes("run") == "helper.py has changed"
    files[0].write_text("WIDTH = 8\n")
    assert recorded_start.describe_changes("run") == "mine.py, helper.py have changed"


def test_comments_and_the_fields_that_a_run_keeps_do_not_count(files):
    text = _MODEL.replace("  # of its layer", "").replace("WIDTH, 20", "WIDTH, 40")
    files[0].write_text(text)
    assert recorded_start.describe_changes("run") == ""


@pytest.mark.parametrize(
    ("resumes", "says"), [(True, "it resumes with"), (False, "nothing is trained now")]
)
def test_the_same_command_after_a_change_says_what_becomes_of_it(files, capsys, resumes, says):
    training._warn_of_changes("run", resumes=resumes)
    assert not capsys.readouterr().err
    files[1].write_text("")
    training._warn_of_changes("run", resumes=resumes)
    assert f"helper.py has changed since the run was started: {says}" in capsys.readouterr().err


def test_files_that_tensorflow_writes_are_no_code_of_the_run(tmp_path, monkeypatch):
    written = [str(tmp_path / "__autograph_generated_filexy.py"), str(tmp_path / "mine.py")]
    for number, path in enumerate(written):
        monkeypatch.setitem(sys.modules, f"m{number}", types.SimpleNamespace(__file__=path))
    found = known_reports.list_own_code()
    assert written[1] in found and written[0] not in found


@pytest.mark.parametrize("record", ["", "{", "[]", '{"files": 1}', '{"files": {"mine.py": 1}}'])
def test_a_run_without_digests_says_nothing(files, record):
    (files[0].parent / "run" / "code.json").write_text(record)
    assert recorded_start.describe_changes("run") == ""


def test_files_that_are_found_only_from_where_the_run_was_started(tmp_path, monkeypatch, capsys):
    started, other = tmp_path / "of me", tmp_path / "other"
    (started / "texts").mkdir(parents=True)
    (started / "texts" / "a.txt").write_text("a")
    (started / "train").mkdir()  # the name of a split
    other.mkdir()
    data = Tokens(train_text="texts/*.txt,gone/*.txt", tokenizer="tokens.json")
    experiment = Experiment(GPT(), data, OptimizerConfig("adam"))
    monkeypatch.chdir(started)
    recorded_start.write(str(tmp_path), FLAGS)
    recorded_start.warn_of_folder(str(tmp_path), experiment)
    assert not capsys.readouterr().err
    line = "tftpu train own.py '--workdir=runs/a b' --config.train.steps=600"
    assert recorded_start.read_command(str(tmp_path)) == line
    monkeypatch.chdir(other)
    assert recorded_start.read_command(str(tmp_path)) == f"cd '{started}' && {line}"
    recorded_start.warn_of_folder(str(tmp_path), experiment)
    said = capsys.readouterr().err
    assert f"data.train_text=texts/*.txt is relative to {started}, where the run" in said
    assert "gone" not in said and "tokens.json" not in said and "train_split" not in said


def test_runs_that_recorded_only_their_code_are_read(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.json").write_text('{"files": {}}')
    experiment = Experiment(GPT(), Tokens(train_text="texts/*.txt"), OptimizerConfig("adam"))
    recorded_start.warn_of_folder(str(tmp_path), experiment)
    assert recorded_start.read_command(str(tmp_path)) == "" and not caplog.records


def test_only_digests_are_kept(files):
    record = json.loads((files[0].parent / "run" / "code.json").read_text())
    assert sorted(record["files"]) == [str(path) for path in sorted(files)]
    assert all(len(digest) == 64 for digest in record["files"].values())
