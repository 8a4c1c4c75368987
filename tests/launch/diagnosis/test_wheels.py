"""`tftpu doctor` in a real environment with the wheels for TPUs, on a machine without a TPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.checkout import ROOT

pytestmark = pytest.mark.exhaustive  # installs half a gigabyte


class Environment:
    """A separate virtual environment."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.folder = folder

    def shell(self, command: str) -> None:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        subprocess.run(command, shell=True, check=True, env={**os.environ, "PATH": path})

    def doctor(self) -> tuple[dict[str, str], list[dict[str, str]]]:
        done = subprocess.run(
            [f"{self.folder}/bin/tftpu", "doctor", "--json"],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "NO_GCE_CHECK": "true"},
            check=False,
        )
        report = json.loads(done.stdout)
        assert done.returncode == (2 if report["problems"] else 0)
        return report["facts"], report["problems"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("tpu") / "venv")
    made.shell(f"pip install -q '{ROOT}[tpu]'")
    return made


def test_the_tpu_extra_has_the_right_wheels_and_no_tpu(environment):
    facts, problems = environment.doctor()
    assert problems == []
    assert facts["TensorFlow"] == "tensorflow-tpu 2.20.0"
    assert facts["TPU"] == "none attached"
    assert facts["TensorFlow sees"] == "CPU; version 2.20.0, with TPU kernels"


@pytest.mark.parametrize(
    ("breakage", "name"),
    [
        ("pip install -q --no-deps tensorflow-cpu==2.20.0", "clobbered-wheel"),
        ("pip install -q --no-deps libtpu==0.0.51", "libtpu-version"),
    ],
)
def test_the_command_that_doctor_gives_fixes_it(environment, breakage, name):
    environment.shell(breakage)
    _, problems = environment.doctor()
    assert [problem["name"] for problem in problems] == [name]
    environment.shell(problems[0]["command"])
    facts, problems = environment.doctor()
    assert problems == []
    assert facts["TensorFlow sees"] == "CPU; version 2.20.0, with TPU kernels"
