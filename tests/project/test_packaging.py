"""The wheel holds one package, `tftpu`, and works outside the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import wheels


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


def test_nothing_top_level_but_tftpu(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tftpu"}
    for expected in (
        "tftpu/py.typed",
        "tftpu/models/families/resnet.py",
        "tftpu/input_pipelines/datasets/digits.py",
        "tftpu/launch/main.py",
        "tftpu/launch/configs/digits_resnet.py",
        "tftpu/launch/diagnosis/wheels.py",
        "tftpu/launch/cloud/startup.sh",
        "tftpu/launch/colab.ipynb",
        "tftpu/launch/starter/model.py.txt",
    ):
        assert expected in names


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    scratch = tmp_path / "venv"
    python = wheels.install(wheel, scratch)
    code = "import tftpu.models; print(tftpu.models.__file__, *tftpu.models.names())"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(scratch) in done.stdout
    assert "resnet50" in done.stdout.split()


def test_the_base_install_requires_no_tensorflow():
    from importlib import metadata

    base = [r for r in metadata.requires("tftpu") if "extra ==" not in r]
    assert base
    wheels = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
    assert not [r for r in base if r.split(">")[0].split("=")[0].strip() in wheels]


def test_without_tensorflow_the_command_names_the_extras_to_install(wheel, tmp_path):
    """Runs `train` in an environment that has everything except TensorFlow."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorflow' else real(name, *a)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "pip install 'tftpu[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr
