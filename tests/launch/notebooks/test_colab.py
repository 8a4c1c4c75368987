"""The notebook: executed from a clean kernel, and stored without outputs."""

import glob
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.notebooks import read_text, set_parameter

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[3] / "launch" / "colab.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> nbformat.NotebookNode:
    """Executes a short run of the notebook in a separate folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("colab")
    set_parameter(notebook, 'PREFLIGHT = ""', 'PREFLIGHT = "v5e-1"')
    set_parameter(notebook, 'SAVE_TO = ""', f'SAVE_TO = "{folder}/drive"')
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    notebook.metadata["folder"] = str(folder)
    return notebook


def test_it_installs_nothing_if_everything_is_installed(executed):
    assert "This is neither Colab nor Kaggle, without a TPU." in read_text(executed)
    assert "nothing was installed" in read_text(executed)


def test_it_shows_the_preflight_report(executed):
    table = read_text(executed).partition("Preflight: global batch 256")[2]
    assert "cost/1k steps" in table
    assert "\nv5e-1 " in table


def test_it_trains_on_the_available_device(executed):
    text = read_text(executed)
    assert "1 replica, float32" in text
    accuracy = float(text.split("'accuracy': ")[1].split("}")[0].split(",")[0])
    assert accuracy > 0.9


def test_it_shows_curves(executed):
    images = [
        output.data["image/png"]
        for cell in executed.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(images) == 1


def test_it_saves_the_run(executed):
    saved = Path(executed.metadata["folder"]) / "drive"
    run = Path(executed.metadata["folder"]) / "runs" / "mine"
    names = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    assert names == {path.relative_to(saved) for path in saved.rglob("*") if path.is_file()}
    assert (saved / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


class Kernel:
    """A stand-in for the notebook's kernel that counts restarts."""

    restarts = 0

    def do_shutdown(self, restart):
        self.restarts += restart


@pytest.mark.parametrize(
    ("place", "tpu", "installed", "loaded", "commands"),
    [
        # Colab's image for TPUs has JAX and perhaps no TensorFlow, its others have TensorFlow;
        # Kaggle's has the wrong one.
        ("COLAB_RELEASE_TAG", True, ["jax", "libtpu"], False, ["install WHEEL[cpu]"]),
        ("COLAB_RELEASE_TAG", True, ["jax", "libtpu", "tensorflow"], False, ["install WHEEL"]),
        ("COLAB_RELEASE_TAG", True, [], False, ["install WHEEL[tpu]"]),
        ("COLAB_RELEASE_TAG", False, ["tensorflow"], False, ["install WHEEL"]),
        (
            "KAGGLE_KERNEL_RUN_TYPE",
            True,
            ["tensorflow-cpu"],
            True,
            ["uninstall --yes tensorflow-cpu tensorflow-tpu", "install WHEEL[tpu]"],
        ),
        ("KAGGLE_KERNEL_RUN_TYPE", True, ["tensorflow-tpu", "tftpu"], False, []),
        ("ELSEWHERE", False, [], False, ["install WHEEL[cpu]"]),
        ("ELSEWHERE", False, ["tftpu"], False, ["install WHEEL[cpu]"]),
    ],
)
def test_it_installs_the_right_packages_on_each_platform(
    monkeypatch, tmp_path, place, tpu, installed, loaded, commands
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tftpu-1.0-py3-none-any.whl").touch()  # uploaded
    cell = next(c for c in nbformat.read(NOTEBOOK, as_version=4).cells if "def pip(" in c.source)
    modules = {"tensorflow" if "tensorflow" in name else name for name in installed}
    for variable in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "TPU_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(place, "x")
    if tpu:
        monkeypatch.setenv("TPU_NAME", "local")
    found = [types.SimpleNamespace(metadata={"Name": name}) for name in installed]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules or None)
    if not loaded:
        monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command[4:]))
    kernel = Kernel()
    scope = {"PACKAGE": "", "get_ipython": lambda: types.SimpleNamespace(kernel=kernel)}
    exec(cell.source, scope)
    wheel = str(tmp_path / "tftpu-1.0-py3-none-any.whl")
    assert [" ".join(c) for c in ran] == [c.replace("WHEEL", wheel) for c in commands]
    assert kernel.restarts == loaded


@pytest.mark.parametrize(
    ("package", "wanted"),
    [
        ("clone", "{here}/clone[tpu]"),
        ("clone/tftpu-1.0-py3-none-any.whl", "{here}/clone/tftpu-1.0-py3-none-any.whl[tpu]"),
        ("git+https://example.com/a/tftpu", "tftpu[tpu] @ git+https://example.com/a/tftpu"),
        ("https://example.com/tftpu-1.0.whl", "tftpu[tpu] @ https://example.com/tftpu-1.0.whl"),
        ("", None),  # no wheel was uploaded
    ],
)
def test_what_it_installs_comes_from_a_file_or_an_address(monkeypatch, tmp_path, package, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "tftpu-1.0-py3-none-any.whl").touch()
    cell = next(c for c in nbformat.read(NOTEBOOK, as_version=4).cells if "def pip(" in c.source)
    source = cell.source[cell.source.index("def requirement") : cell.source.index("missing = ")]
    scope = {"PACKAGE": package, "glob": glob, "os": os}
    exec(source, scope)
    if wanted is None:
        with pytest.raises(SystemExit, match=r"pip wheel --no-deps"):
            scope["requirement"]("[tpu]")
    else:
        assert scope["requirement"]("[tpu]") == wanted.format(here=tmp_path)
