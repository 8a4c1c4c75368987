"""The public API checks in a user's editor: strictly typed, with errors for unknown names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.checkout import ROOT

SCRIPT = """
import keras
import tensorflow as tf

import tftpu


def dataset() -> tf.data.Dataset:
    x = tf.zeros((64, 8))
    y = tf.zeros((64,), tf.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


def main() -> float:
    engine: tftpu.Engine = tftpu.connect(tpu="none", virtual_devices=2)
    with engine.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    options = tftpu.TrainConfig(global_clipnorm=1.0, gradient_accumulation_steps=2)
    trainer = tftpu.Trainer(model, "runs/mine", options)
    trainer.fit(dataset(), steps=10, validation_data=dataset(), eval_every=5)
    results: dict[str, float] = trainer.evaluate(dataset(), return_dict=True)
    return results["loss"]
"""
WRONG = """
import tftpu

tftpu.Nonexistent
options = tftpu.TrainConfig(global_clip=1.0)
trainer: int = tftpu.connect()
"""
# The strict rules that TensorFlow and Keras break because they publish no types.
THEIRS = (
    *("reportUnknownMemberType", "reportUnknownVariableType", "reportUnknownArgumentType"),
    *("reportMissingTypeStubs", "reportUnknownParameterType", "reportMissingTypeArgument"),
)


def errors(folder: Path, script: str) -> list[str]:
    """Returns the rules that a script in a folder breaks, in strict mode."""
    (folder / "mine.py").write_text(f"# pyright: strict\n{script}")
    config = {"include": ["mine.py"], "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--project", str(folder), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [item["rule"] for item in found if item["severity"] == "error"]


@pytest.mark.slow
def test_a_script_of_the_public_api_checks_in_strict_mode(tmp_path):
    assert [rule for rule in errors(tmp_path, SCRIPT) if rule not in THEIRS] == []


def test_a_mistake_is_an_error(tmp_path):
    """The check can fail: an unknown name, an unknown option, a wrong type."""
    found = set(errors(tmp_path, WRONG))
    assert found >= {"reportAttributeAccessIssue", "reportCallIssue", "reportAssignmentType"}
