"""Checkpoints: visible only when whole, and what is broken is not taken for whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.errors import UserError


def variables(value: float, shape=(3, 2)) -> dict[str, list]:
    return {
        "model": [tf.Variable(np.full(shape, value, np.float32), name="kernel")],
        "step": [tf.Variable(int(value), dtype=tf.int64, name="step")],
    }


def value_of(group: dict[str, list]) -> float:
    return float(group["model"][0].numpy().flat[0])


def test_what_was_saved_is_restored(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.restore(variables(0)) is None
    checkpoints.save(7, variables(7), {"skipped": 2})
    target = variables(0)
    restored = checkpoints.restore(target)
    assert (restored.step, restored.state) == (7, {"skipped": 2})
    assert value_of(target) == 7
    assert int(target["step"][0].numpy()) == 7


def test_a_folder_without_its_manifest_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, variables(1), {})
    checkpoints.save(2, variables(2), {})
    checkpoints.wait()
    (tmp_path / "checkpoints/2/manifest.json").unlink()
    target = variables(0)
    assert checkpoints.restore(target).step == 1
    assert value_of(target) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(damage, tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, variables(1), {})
    checkpoints.save(2, variables(2), {})
    checkpoints.wait()
    path = tmp_path / "checkpoints/2/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-3])
    target = variables(0)
    assert checkpoints.restore(target).step == 1
    assert value_of(target) == 1
    assert "checkpoints/2 is broken" in caplog.text


def test_a_checkpoint_of_another_model_is_a_sentence(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, variables(1), {})
    target = variables(0, shape=(4, 2))
    with pytest.raises(UserError, match=r"another model: kernel.* is \(4, 2\) here and \(3, 2\)"):
        checkpoints.restore(target)
    assert value_of(target) == 0
    target["model"].append(tf.Variable(1.0, name="bias"))
    with pytest.raises(UserError, match=r"bias.* is not in the checkpoint"):
        checkpoints.restore(target)


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    for step in range(1, 6):
        checkpoints.save(step, variables(step), {}, Best("loss", 0.5) if step == 2 else None)
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.best() == 2


def test_keras_variables_of_every_dtype_come_back(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    kinds = ("float32", "bfloat16", "float16", "int32", "bool")
    saved = [keras.Variable(np.ones(3), dtype=kind, name=kind) for kind in kinds]
    checkpoints.save(1, {"model": saved}, {})
    target = [keras.Variable(np.zeros(3), dtype=kind, name=kind) for kind in kinds]
    checkpoints.restore({"model": target})
    for variable in target:
        assert (keras.ops.convert_to_numpy(variable.value).astype("float32") == 1).all()
