"""Checkpoints are visible only when complete, and damaged ones are never loaded."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tests.support.models.leaves import leaf, leaves, step_of, value, value_of
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.errors import UserError
from tftpu.storage.owner import LockLostError, build_lost_error


def test_saved_values_are_restored(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.restore(leaves(0)) is None
    checkpoints.save(7, leaves(7), {"skipped": 2})
    target = leaves(0)
    restored = checkpoints.restore(target)
    assert (restored.step, restored.state) == (7, {"skipped": 2})
    assert value_of(target) == 7
    assert step_of(target) == 7


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    checkpoints.save(2, leaves(2), {})
    checkpoints.wait()
    (tmp_path / "checkpoints/2/manifest.json").unlink()
    target = leaves(0)
    assert checkpoints.restore(target).step == 1
    assert value_of(target) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage, tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    checkpoints.save(2, leaves(2), {})
    checkpoints.wait()
    path = tmp_path / "checkpoints/2/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-3])
    target = leaves(0)
    assert checkpoints.restore(target).step == 1
    assert value_of(target) == 1
    assert "checkpoints/2 is damaged" in caplog.text


def test_a_checkpoint_of_another_model_fails_with_the_differences(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    target = leaves(0, shape=(4, 2))
    with pytest.raises(
        UserError, match=r"belongs to another model: kernel is \(4, 2\), saved as \(3, 2\)"
    ):
        checkpoints.restore(target)
    assert value_of(target) == 0
    target["model"].append(leaf("bias", np.array(1.0)))
    with pytest.raises(UserError, match=r"bias is not in the checkpoint"):
        checkpoints.restore(target)


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    for step in range(1, 6):
        checkpoints.save(step, leaves(step), {}, Best("loss", 0.5) if step == 2 else None)
    assert checkpoints.list_steps() == [2, 4, 5]
    assert checkpoints.find_best() == 2


def test_a_step_without_a_checkpoint_fails_with_those_there_are(tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    with pytest.raises(UserError, match=r"step 99 in .* is missing .*; complete ones: 1"):
        checkpoints.restore(leaves(0), 99)
    assert not caplog.text  # nothing is damaged


def test_arrays_of_every_dtype_are_restored(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    kinds = ("float32", "float64", ml_dtypes.bfloat16, "float16", "int8", "int64", "uint32", "bool")
    saved = [leaf(str(kind), np.ones(3, kind)) for kind in kinds]
    checkpoints.save(1, {"model": saved}, {})
    target = [leaf(str(kind), np.zeros(3, kind)) for kind in kinds]
    checkpoints.restore({"model": target})
    for restored in target:
        assert (value(restored) == 1).all()


def test_values_of_another_precision_are_rounded(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    third = np.full(3, 1 / 3, np.float32)
    checkpoints.save(1, {"model": [leaf("kernel", third)]}, {})
    target = leaf("kernel", np.zeros(3, ml_dtypes.bfloat16))
    checkpoints.restore({"model": [target]})
    assert (value(target) == third.astype(ml_dtypes.bfloat16)).all()


def test_checkpoints_need_no_tensorflow():
    code = "import sys, tftpu.checkpoint.store; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_workdir_lost_during_a_save_ends_the_run_at_the_next_one(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))

    def lose():
        raise build_lost_error(tmp_path, "was deleted")

    checkpoints.save(1, leaves(1), {}, first=lose)
    with pytest.raises(LockLostError, match="was deleted while this run was writing"):
        checkpoints.save(2, leaves(2), {})
    assert checkpoints.take_failure() is None and checkpoints.list_steps() == []
