"""The wheel holds one package, `tftpu`, and works outside the checkout."""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.repository import wheels
from tftpu.launch.cloud.shipping import own_wheel
from tftpu.version import __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_nothing_top_level_but_tftpu(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tftpu"}
    for expected in (
        "tftpu/py.typed",
        "tftpu/models/families/resnet.py",
        "tftpu/input_pipelines/datasets/builders/digits.py",
        "tftpu/launch/main.py",
        "tftpu/launch/configs/digits_resnet.py",
        "tftpu/launch/diagnosis/wheels.py",
        "tftpu/launch/cloud/tpu_vm/startup.sh",
        "tftpu/launch/cloud/shipping/machine.sh",
        "tftpu/launch/colab.ipynb",
        "tftpu/launch/starter/model.py.txt",
    ):
        assert expected in names


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Returns the interpreter of an environment that has the wheel and nothing else."""
    return wheels.install(wheel, tmp_path_factory.mktemp("outside") / "venv")


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(python, tmp_path):
    code = "import tftpu.models; print(tftpu.models.__file__, *tftpu.models.names())"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(python.parent.parent) in done.stdout
    assert "resnet50" in done.stdout.split()


def code_in(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    return {name: wheel.read(name) for name in wheel.namelist() if name.startswith("tftpu/")}


def licence_in(archive: zipfile.ZipFile) -> bytes:
    """Returns the licence, which each version of setuptools puts into another folder."""
    (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
    return archive.read(name)


@pytest.mark.slow
def test_the_wheel_that_launchers_send_is_the_one_that_pip_builds(wheel):
    """From a checkout: the same files with the same bytes, and a RECORD that is true."""
    sent = zipfile.ZipFile(io.BytesIO(own_wheel.build()))
    built = zipfile.ZipFile(wheel)
    assert wheel.name == own_wheel.NAME
    assert code_in(sent) == code_in(built)
    (info,) = {name.split("/")[0] for name in sent.namelist()} - {"tftpu"}
    for name in ("entry_points.txt", "top_level.txt"):
        assert sent.read(f"{info}/{name}") == built.read(f"{info}/{name}")
    assert licence_in(sent) == licence_in(built)
    rows = list(csv.reader(io.StringIO(sent.read(f"{info}/RECORD").decode())))
    assert {row[0] for row in rows} == set(sent.namelist())
    for name, digest, size in rows:
        if digest:
            data = hashlib.sha256(sent.read(name)).digest()
            assert digest == "sha256=" + base64.urlsafe_b64encode(data).rstrip(b"=").decode()
            assert int(size) == len(sent.read(name))


def test_a_clone_that_is_newer_than_its_installation_sends_its_own_version(monkeypatch, tmp_path):
    info = tmp_path / "tftpu-0.0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tftpu\nVersion: 0.0.9\n")
    older = [metadata.Distribution.at(info)]
    monkeypatch.setattr(own_wheel.metadata, "distributions", lambda name: older)
    sent = zipfile.ZipFile(io.BytesIO(own_wheel.build()))
    text = sent.read(f"tftpu-{__version__}.dist-info/METADATA").decode()
    assert text == f"Metadata-Version: 2.1\nName: tftpu\nVersion: {__version__}\n"


@pytest.mark.slow
def test_the_wheel_that_launchers_send_needs_no_checkout(wheel, python, tmp_path):
    """From an installed wheel, twice: the same bytes, with all the files of that wheel."""
    code = (
        "import sys; from tftpu.launch.cloud.shipping import own_wheel as w;"
        "sys.stdout.buffer.write(w.build())"
    )
    first, again = (
        subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == again
    sent, built = zipfile.ZipFile(io.BytesIO(first)), zipfile.ZipFile(wheel)
    assert code_in(sent) == code_in(built)
    (notes,) = (name for name in built.namelist() if name.endswith("/METADATA"))
    assert sent.read(notes) == built.read(notes)


def test_the_base_install_requires_no_tensorflow():
    base = [r for r in metadata.requires("tftpu") if "extra ==" not in r]
    assert base
    wheels = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
    assert not [r for r in base if r.split(">")[0].split("=")[0].strip() in wheels]


@pytest.mark.medium
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
    assert "pip install 'tensorflow" in done.stderr  # tensorflow-cpu, on most machines
    assert "Traceback" not in done.stderr


def test_the_extra_of_preflight_stops_at_the_newest_tpu_compiler_that_was_tried():
    """Prices rest on the text of its programs, which may change with any release."""
    lines = [line for line in metadata.requires("tftpu") if 'extra == "preflight"' in line]
    [libtpu] = [one for one in map(Requirement, lines) if one.name == "libtpu"]
    assert libtpu.specifier.contains(metadata.version("libtpu"))
    assert not libtpu.specifier.contains("0.0.53") and not libtpu.specifier.contains("0.1")
