"""Every line that README gives to copy for Colab, TPU VMs and Vertex AI works as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from tftpu.launch import main

ROOT = Path(__file__).parent.parent.parent
HEADINGS = ("On Colab or Kaggle", "On a TPU VM", "On Vertex AI", "When it does not work")


def code(heading: str) -> list[str]:
    """The lines to copy under a heading."""
    text = (ROOT / "README.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    return [line[4:] for line in section.splitlines() if line.startswith("    ")]


def commands(heading: str) -> list[str]:
    """Those lines as commands: continued ones joined, without remarks."""
    joined = "\n".join(code(heading)).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).removeprefix("!") for line in joined]


COMMANDS = {command: heading for heading in HEADINGS for command in commands(heading)}


@pytest.mark.parametrize("heading", HEADINGS)
def test_there_are_few_lines_to_copy(heading):
    recipes = "\n".join(code(heading)).split("pip install 'tftpu[tpu]'")  # two, for a TPU VM
    assert all(len(recipe.strip().splitlines()) <= 5 for recipe in recipes)
    assert commands(heading)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command(command, tmp_path, monkeypatch, capsys):
    words = shlex.split(command)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.chdir(tmp_path)
    if words[:2] == ["tftpu", "launch"]:
        assert main.main([*words[1:], "--dry_run"]) == 0
        assert "PROJECT" in capsys.readouterr().out
    elif words[:2] == ["tftpu", "train"]:
        assert main.main([*words[1:], "--config.train.steps=2", "--tpu=none"]) == 0
    elif words == ["tftpu", "doctor"]:
        assert main.main(words[1:]) == 0
    elif words[:2] == ["pip", "install"]:
        extra = re.fullmatch(r"tftpu\[(\w+)\]", words[2])[1]
        assert f'"{extra}": [' in (ROOT / "setup.py").read_text()
    elif words[:2] == ["docker", "build"]:
        (dockerfile,) = (w.partition("=")[2] for w in words if w.startswith("--file="))
        assert (ROOT / dockerfile).exists()
        (tag,) = (w.partition("=")[2] for w in words if w.startswith("--tag="))
        assert f"docker push {tag}" in COMMANDS
        (launch,) = (c for c in COMMANDS if c.startswith("tftpu launch vertex"))
        assert main.main([*shlex.split(launch)[1:], "--dry_run"]) == 0
        assert f"imageUri: {tag}\n" in capsys.readouterr().out
    else:
        known = (
            "pip uninstall -y tensorflow",
            "gcloud auth application-default login",
            "docker push",
        )
        assert command.startswith(known), "no test covers this line"
