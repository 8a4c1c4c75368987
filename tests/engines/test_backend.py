"""Keras 2 and other backends of Keras 3 end with a clear message."""

import subprocess
import sys

import pytest

from tftpu.engines import backend
from tftpu.errors import UserError


@pytest.mark.parametrize("code", ["tftpu.connect()", "tftpu.Trainer"])
@pytest.mark.parametrize("imports", ["import tftpu", "import keras, tftpu"])
def test_another_backend_is_named(code, imports):
    if imports.startswith("import keras"):
        imports = f"import sys, types\nsys.modules['keras'] = {FAKE}\nimport tftpu"
    script = f"{imports}\ntry:\n    {code}\nexcept tftpu.UserError as e:\n    print(e)\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"KERAS_BACKEND": "jax", "PATH": ""},
    )
    assert "Keras runs on jax (KERAS_BACKEND=jax)" in done.stdout, done.stderr
    assert "set KERAS_BACKEND=tensorflow" in done.stdout


# Importing the real one on JAX takes seconds.
FAKE = (
    "types.SimpleNamespace(__version__='3.15.1', "
    "config=types.SimpleNamespace(backend=lambda: 'jax'))"
)


def test_keras_2_is_named(monkeypatch):
    class Keras2:
        __version__ = "2.15.0"

    monkeypatch.setitem(sys.modules, "keras", Keras2)
    with pytest.raises(UserError, match=r"Keras 2\.15\.0 is installed.*pip install 'keras>=3"):
        backend.check_keras()


def test_a_model_of_keras_2_is_named():
    from tftpu.training.trainer import Trainer

    legacy = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    with pytest.raises(UserError, match=r"is a model of Keras 2 .*write `import keras`"):
        Trainer(legacy())


def test_the_command_line_says_it_before_it_trains(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"KERAS_BACKEND": "torch", "PATH": ""},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tftpu: Keras runs on torch")
    assert len(done.stderr.strip().splitlines()) == 1
