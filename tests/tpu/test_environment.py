"""The environment variables of a TPU, for each kind of machine."""

import os
import subprocess
import sys

import pytest

from tftpu.tpu import environment


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Returns a function that prepares a machine with a device file, and returns its variables."""
    (tmp_path / "site" / "libtpu").mkdir(parents=True)
    (tmp_path / "site" / "libtpu" / "__init__.py").touch()

    def prepare(
        device: str | None, libtpu: bool = True, wheel: str = "tensorflow_tpu", **environ: str
    ) -> dict[str, str]:
        monkeypatch.delitem(sys.modules, "libtpu", raising=False)  # other tests may have loaded it
        monkeypatch.setattr(sys, "path", [str(tmp_path / "site")] if libtpu else [])
        info = tmp_path / "site" / f"{wheel}-2.20.0.dist-info"
        info.mkdir(exist_ok=True)
        name = wheel.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.0\n")
        if device:
            (tmp_path / device).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / device).touch()
        environment.prepare(environ, str(tmp_path))
        return environ

    return prepare


def test_pjrt_is_enabled_from_v5e_on(prepared, tmp_path):
    assert prepared("dev/vfio/0") == {
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(tmp_path / "site/libtpu/libtpu.so"),
        "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=true",
        "TPU_NAME": "local",
    }


def test_nothing_is_needed_up_to_v4(prepared):
    assert prepared("dev/accel0") == {}


def test_without_a_tpu_no_metadata_server_is_queried(prepared):
    assert prepared(None) == {"TPU_SKIP_MDS_QUERY": "1"}


def test_nothing_is_set_without_libtpu(prepared):
    assert prepared("dev/vfio/0", libtpu=False) == {}


def test_another_tensorflow_leaves_the_tpu_to_jax(prepared):
    assert prepared("dev/vfio/0", wheel="tensorflow_cpu") == {}


def test_variables_of_the_user_are_kept(prepared):
    assert prepared("dev/vfio/0", PJRT_DEVICE="CPU", TPU_NAME="mine")["PJRT_DEVICE"] == "CPU"
    assert prepared("dev/vfio/0", TPU_NAME="mine")["TPU_NAME"] == "mine"


def test_notes_of_tensorflow_are_hidden_unless_it_is_imported_or_the_user_says_otherwise(
    monkeypatch,
):
    def quieten(**environ: str) -> dict[str, str]:
        environment.quieten_tensorflow(environ)
        return environ

    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    assert quieten() == {}
    monkeypatch.delitem(sys.modules, "tensorflow")
    assert quieten() == {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with_gpu: dict[str, str] = {}
    environment.quieten_tensorflow(with_gpu, gpu=__file__)
    assert with_gpu == {"TF_CPP_MIN_LOG_LEVEL": "2"}
    assert quieten(TF_CPP_MIN_LOG_LEVEL="0") == {"TF_CPP_MIN_LOG_LEVEL": "0"}


@pytest.mark.slow
def test_a_program_prints_no_notes_of_tensorflow():
    environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    program = "import tftpu, tensorflow; tensorflow.constant(0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
