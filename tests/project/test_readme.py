"""What README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def example() -> str:
    return re.search(r"<!-- example -->\n```python\n(.*?)```", README, re.S).group(1)


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


def test_the_commands_name_configs_that_there_are():
    from tftpu.launch import config_flags

    named = set(re.findall(r"--config=(\w+)", README))
    assert named and named <= set(config_flags.names())


def test_the_folders_of_the_layout_are_there():
    root = Path(__file__).parent.parent.parent
    for folder in re.findall(r"^    (\w+)/ ", README, re.M):
        assert os.path.isdir(root / folder)
