"""Completion: the words that a shell offers after a part of a command line."""

import os
import subprocess
import sys

import pytest


def complete(line, folder):
    """Returns the completions of a line, by argcomplete's protocol."""
    told = folder / "told"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(told),
        "_ARGCOMPLETE_SHELL": "bash",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    code = "from tftpu.launch.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, cwd=folder, check=False
    )
    assert done.returncode == 0
    return {word.strip() for word in told.read_text().splitlines()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "photos.py").write_text("")
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tftpu pre", {"predict", "preflight"}),
        ("tftpu data ver", {"verify"}),
        ("tftpu launch vertex-e", {"vertex-endpoint"}),
        ("tftpu train digits", {"digits_resnet"}),
        ("tftpu train pho", {"photos.py"}),
        ("tftpu train digits_resnet --virt", {"--virtual_devices"}),
        ("tftpu train digits_resnet --config.train.best", {"--config.train.best_metric"}),
        ("tftpu train digits_resnet --config.model.wid", {"--config.model.width"}),
        ("tftpu evaluate runs/m", {"runs/mine"}),
        ("tftpu preflight digits_resnet --slices v5p-12", {"v5p-128"}),
        ("tftpu preflight digits_resnet --slices v3-8,v5p-12", {"v3-8,v5p-128"}),
        ("tftpu preflight digits_resnet --slices tpu7x-12", {"tpu7x-128"}),
    ],
)
def test_a_word_is_completed(line, expected, folder):
    assert complete(line, folder) == expected


def test_all_commands_follow_the_name(folder):
    assert {"train", "preflight", "data", "launch"} <= complete("tftpu ", folder)
