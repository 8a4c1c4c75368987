"""The notebook that fine-tunes a KerasHub model: executed with a small preset of random weights."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.hub.byte_gpt2 import build_byte_gpt2
from tests.support.notebooks import read_text, set_parameter
from tests.support.repository.checkout import ROOT

pytestmark = pytest.mark.slow

NOTEBOOK, OTHER = ROOT / "launch/lora.ipynb", ROOT / "launch/colab.ipynb"


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> str:
    """Saves a small GPT-2 whose tokens are bytes; returns its folder."""
    folder = str(tmp_path_factory.mktemp("presets") / "small")
    build_byte_gpt2().save_to_preset(folder)
    return folder


@pytest.fixture(scope="module")
def executed(preset, tmp_path_factory) -> nbformat.NotebookNode:
    """Executes the notebook in a separate folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("lora")
    set_parameter(notebook, 'PRESET = "gpt2_base_en"', f'PRESET = "{preset}"')
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    notebook.metadata["folder"] = str(folder)
    return notebook


def test_it_trains_adapters_and_generates(executed):
    text = read_text(executed)
    assert "12 layers are adapted." in text
    assert text.count("What does math.sqrt do?\n") == 2  # before and after the training
    losses = [
        float(line.split("loss ")[1].split()[0]) for line in text.splitlines() if "  loss " in line
    ]
    assert len(losses) >= 2 and losses[-1] < losses[0]


def test_checkpoints_hold_the_adapters_alone(executed):
    from safetensors import safe_open

    run = Path(executed.metadata["folder"]) / "runs" / "lora"
    (file,) = run.glob("checkpoints/*/model.safetensors")
    with safe_open(file, "np") as stored:
        names = list(stored.keys())
    assert names and all("lora" in name for name in names)


def test_the_saved_preset_has_the_trained_weights(executed, preset):
    import keras_hub
    import numpy as np

    saved = str(Path(executed.metadata["folder"]) / "runs" / "lora" / "preset")
    first, tuned = (keras_hub.models.CausalLM.from_preset(folder) for folder in (preset, saved))
    tokens = {"token_ids": np.ones((1, 8), "int32"), "padding_mask": np.ones((1, 8), "int32")}
    assert len(first.weights) == len(tuned.weights)
    assert not np.allclose(first(tokens), tuned(tokens), atol=1e-3)


def test_it_installs_and_saves_as_the_other_notebook_does():
    ours, theirs = (nbformat.read(path, as_version=4) for path in (NOTEBOOK, OTHER))
    sources = [cell.source for cell in theirs.cells]
    for part in ("def pip(", "def copy_folder("):
        (cell,) = (cell for cell in ours.cells if part in cell.source)
        assert cell.source in sources


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)
