"""Keras 2 and other backends of Keras 3 end with a clear message."""

import os
import subprocess
import sys

import keras
import pytest

import tftpu
from tftpu.config import ClusterConfig
from tftpu.engines import backend, selection
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
        env={"KERAS_BACKEND": "torch", "PATH": ""},
    )
    assert "Keras runs on torch (KERAS_BACKEND=torch)" in done.stdout, done.stderr
    assert "set KERAS_BACKEND=tensorflow or jax" in done.stdout


# Importing the real one takes seconds.
FAKE = (
    "types.SimpleNamespace(__version__='3.15.1', "
    "config=types.SimpleNamespace(backend=lambda: 'torch'))"
)


def test_keras_2_is_named(monkeypatch):
    class Keras2:
        __version__ = "2.15.0"

    monkeypatch.setitem(sys.modules, "keras", Keras2)
    with pytest.raises(UserError, match=r"Keras 2\.15\.0 is installed.*pip install 'keras>=3"):
        backend.check_keras()


@pytest.mark.parametrize("cluster", [{"engine": "jax"}, {"mesh": "fsdp:2"}])
def test_another_engine_than_that_of_a_loaded_keras_is_refused(cluster):
    with pytest.raises(
        UserError, match="loaded with the backend tensorflow, but engine='jax' needs"
    ):
        selection.connect(**cluster)


def test_auto_takes_the_engine_that_a_mesh_or_the_backend_asks_for(monkeypatch):
    assert selection.choose_engine(ClusterConfig()) == "tensorflow"
    assert selection.choose_engine(ClusterConfig(mesh="fsdp:2")) == "jax"
    assert selection.choose_engine(ClusterConfig(engine="jax")) == "jax"
    monkeypatch.setattr(backend, "read_name", lambda: "jax")
    assert selection.choose_engine(ClusterConfig()) == "jax"
    assert selection.choose_engine(ClusterConfig(engine="tensorflow")) == "tensorflow"


def test_the_jax_engine_without_jax_is_refused(monkeypatch):
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs jax, which is not installed: .* \[jax\] extra"):
        selection.choose_backend(ClusterConfig(engine="jax"))


@pytest.mark.slow
def test_jax_does_not_look_for_a_tpu_where_there_is_none():
    code = (
        "import tftpu; e = tftpu.connect(engine='jax'); import jax; print(jax.config.jax_platforms)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "cpu\n" and "TPU" not in done.stderr


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


@pytest.mark.parametrize("floatx", ["float16", "float64"])
def test_another_floatx_is_named_before_anything_is_built(floatx):
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        with pytest.raises(UserError, match=f"floatx is '{floatx}'.*train.precision"):
            tftpu.connect()
    finally:
        keras.config.set_floatx(before)


def test_floatx_in_the_file_of_keras_is_named_before_keras_is_imported(tmp_path):
    (tmp_path / "keras.json").write_text('{"floatx": "float16"}')
    script = "import tftpu\ntry:\n    tftpu.connect()\nexcept tftpu.UserError as e:\n    print(e)\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"KERAS_HOME": str(tmp_path), "PATH": ""},
    )
    assert f"{tmp_path}/keras.json sets floatx to 'float16'" in done.stdout, done.stderr


def test_an_empty_backend_is_tensorflow(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "")
    backend.prefer_tensorflow()
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
