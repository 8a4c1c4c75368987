"""README is short, and its promises to a first reader hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import doc_blocks

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def example() -> str:
    return re.search(r"<!-- example -->\n```python\n(.*?)```", README, re.S).group(1)


def test_it_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.slow
def test_the_example_trains_a_plain_keras_model(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(example())
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    accuracy = float(re.search(r"'accuracy': ([0-9.]+)", done.stdout).group(1))
    assert accuracy > 0.95
    assert (tmp_path / "runs/mine/metrics.jsonl").exists()


def test_the_example_is_short():
    assert len([line for line in example().splitlines() if "import" not in line and line]) <= 15


def test_the_commands_name_existing_configs():
    from tftpu.launch.settings import config_flags

    named = set(re.findall(r"tftpu (?:train|preflight) (\w+)(?!\w*\.py)\b", README))
    assert named and named <= set(config_flags.list_names())


def test_the_config_of_a_readers_own_is_valid(tmp_path):
    from tftpu.launch.settings import config_flags

    (block,) = [block for block in doc_blocks.blocks("README.md") if block.title]
    (tmp_path / block.title).write_text(block.text)
    config_flags.load(str(tmp_path / block.title), []).validate()


def test_blocks_of_commands_are_short():
    for block in doc_blocks.blocks("README.md"):
        if block.language == "bash":
            assert len(block.commands) <= 6
