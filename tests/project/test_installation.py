"""The commands that install an extra, and the name that nobody is told to install."""

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.repository import checkout
from tests.support.repository.checkout import ROOT
from tftpu import installation
from tftpu.version import __version__

# `pip install tftpu`, also with an extra; a path, an address and `-e .` are something else.
BY_NAME = re.compile(
    r"pip3? install [^\n`]*?(?<![\w/.=-])tftpu(?:\[[^\]]*\])?(?! @ )(?=[\s'\"`=<>~]|$)"
)


@pytest.mark.parametrize(
    "extra", ["plot", "gcp", "text", "bigquery", "beam", "tpu", "preflight", "kfp"]
)
def test_a_command_names_the_packages_of_an_extra_and_nothing_else(extra):
    pip, install, *words = shlex.split(installation.command(extra))
    assert (pip, install) == ("pip", "install")
    declared = re.search(rf'"{extra}": \[(.*?)\]\n?,?\n', (ROOT / "setup.py").read_text(), re.S)[1]
    texts = re.findall(r'"([^"]+)"', declared)
    assert {str(Requirement(word)) for word in words} == {str(Requirement(text)) for text in texts}


def test_an_extra_has_one_package_for_each_platform():
    assert re.fullmatch(r"pip install 'tensorflow(-cpu)?~=2.20.0'", installation.command("cpu"))


def test_a_clone_that_was_never_installed_installs_itself(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert installation.command("plot") == "pip install -e '.[plot]'"


def test_nothing_says_to_install_tftpu_by_a_name_that_anyone_may_register():
    assert BY_NAME.search("run `pip install 'tftpu[cpu]'`")
    assert BY_NAME.search("pip install tftpu")
    assert not BY_NAME.search("pip install './tftpu-0.1.0-py3-none-any.whl[cpu]'")
    assert not BY_NAME.search("pip install 'tftpu[cpu] @ git+URL'")
    found = []
    for folder in ("tftpu", "models", "input_pipelines", "launch", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".ipynb") or path.name == "Dockerfile":
                said = BY_NAME.findall(path.read_text())
                found += [f"{path.relative_to(ROOT)}: {line}" for line in said]
    found += BY_NAME.findall((ROOT / "README.md").read_text())
    assert found == []


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Returns a Git repository of the checkout."""
    target = checkout.copy(tmp_path_factory.mktemp("clone"))
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=target, check=True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("line", ["clone", "wheel", "Git URL"])
def test_the_lines_of_the_documentation_install_tftpu(line, clone, tmp_path):
    """`pip install '.[cpu]'`, `'./tftpu-….whl[cpu]'`, `'tftpu[cpu] @ git+URL'`; no dependencies."""
    build = [sys.executable, "-m", "pip", "-q", "--no-input"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    if line == "wheel":
        subprocess.run([*build, "wheel", *offline, "-w", tmp_path, clone], check=True)
    what = {
        "clone": ".[cpu]",
        "wheel": f"./tftpu-{__version__}-py3-none-any.whl[cpu]",
        "Git URL": f"tftpu[cpu] @ git+file://localhost{clone}",
    }[line]
    documented = (ROOT / "docs" / "installation.md").read_text()
    written = what.replace(f"file://localhost{clone}", "https://HOST/OWNER/tftpu")
    assert f"'{written}'\n" in documented  # with -e for the clone, not for --target
    folder = clone if line == "clone" else tmp_path
    install = [*build, "install", *offline, f"--target={tmp_path / 'there'}", what]
    subprocess.run(install, cwd=folder, check=True)
    code = "import tftpu.launch.main as m; print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "there"), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "there"))
