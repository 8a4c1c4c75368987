"""Commands that know one engine only, and configs that need the other."""

import subprocess
import sys

import pytest


def said(*command: str) -> str:
    """Returns what a command says that is refused."""
    done = subprocess.run(
        [sys.executable, "-m", "tftpu.launch.main", *command], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize("command", ["bench", "preflight"])
def test_a_command_that_knows_tensorflow_only_says_so(command):
    found = said(command, "--config=digits_resnet", "--config.cluster.mesh=fsdp:2")
    assert f"tftpu {command} knows the step of the TensorFlow engine only" in found


def test_a_misspelled_mesh_is_named_before_anything_loads(tmp_path):
    found = said(
        *("train", "--config=digits_resnet", f"--workdir={tmp_path}/run"),
        "--config.cluster.mesh=fspd:2",
    )
    assert "an axis 'fspd'" in found and "Did you mean 'fsdp'?" in found
    assert not (tmp_path / "run").exists()
