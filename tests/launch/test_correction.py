"""Mistaken command lines: each answer names a line, and that line is one that runs."""

import re
import shlex
from pathlib import Path

import pytest

from tftpu.launch import correction, main
from tftpu.launch.settings.options import ConfigOptions
from tftpu.launch.settings.parsing import HELP, parse

_TEXT = (Path(__file__).parent / "mistaken_lines.txt").read_text()
LINES = re.findall(r"^(.+)\n    (.+)$", _TEXT, re.MULTILINE)


@pytest.fixture
def _folders(tmp_path, monkeypatch):
    """Changes to a folder with a run and with pictures."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/digits_resnet", "photos/train/cat"):
        (tmp_path / name).mkdir(parents=True)


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_mistake_is_answered_by_a_line_that_runs(line, expected, capsys):
    assert main.main(shlex.split(line)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].split(": tftpu ")[1] == expected
    assert said[-1].startswith(("Type: ", "For example: "))
    _check(shlex.split(expected))


def _check(words):
    """Parses a line, and loads its config: what a command does before its work."""
    if words[-1] in HELP:
        assert main.main(words) == 0
        return
    commands = main.load_commands()
    name = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    options = parse(name, commands[name].options, words[len(name.split()) :])
    if isinstance(options, ConfigOptions):
        options.load_experiment()


def test_there_are_as_many_lines_as_promised():
    assert len(LINES) >= 60


def test_a_line_that_would_fail_again_is_not_suggested(capsys):
    assert main.main(["trian", "digits_resnet", "--config.train.steps=many"]) == 2
    assert "Type:" not in capsys.readouterr().err


def test_names_of_other_tools_are_those_of_commands_and_fields():
    commands = main.load_commands()
    assert {*correction.SYNONYMS.values()} <= {*commands}
    assert not {*correction.SYNONYMS} & {*commands}
