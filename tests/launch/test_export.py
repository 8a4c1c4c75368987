"""`tftpu export` on a small run of images."""

import numpy as np
import onnxruntime
import pytest

from tftpu.input_pipelines.datasets import small
from tftpu.launch.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    workdir = str(tmp_path_factory.mktemp("run"))
    steps = ("epochs=None", "steps=12", "steps_per_loop=6", "eval_every=12", "log_every=12")
    options = [f"--config.train.{option}" for option in steps]
    options += ["--config.train.ema_momentum=0.5", "--config.optimizer.warmup_steps=1"]
    assert main(["train", "--config=digits_resnet", f"--workdir={workdir}", *options]) == 0
    return workdir


def test_onnx_takes_pixels_and_is_as_accurate_as_the_evaluation(run, tmp_path, capsys):
    to = str(tmp_path / "digits.onnx")
    assert main(["export", f"--workdir={run}", "--format=onnx", f"--to={to}"]) == 0
    said = capsys.readouterr().out
    assert "images uint8 [8, 8, 1], any batch" in said and "logits, class, label" in said
    assert main(["evaluate", f"--workdir={run}"]) == 0
    accuracy = float(capsys.readouterr().out.split()[-1])
    examples = small.in_memory("digits", None, "test")
    session = onnxruntime.InferenceSession(to, providers=["CPUExecutionProvider"])
    label, classes = session.run(["label", "class"], {"images": np.asarray(examples["image"])})
    assert np.mean(classes == examples["label"]) == pytest.approx(accuracy, abs=1e-4)
    assert label.tolist() == [str(number) for number in classes]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format=onix", "--to=m"], "Did you mean 'onnx'?"),
        (["--format=onnx", "--to=m"], "ends in .onnx"),
        (["--format=keras", "--to=m.onnx"], "ends in .keras"),
    ],
)
def test_a_mistake_is_explained(run, capsys, words, message):
    assert main(["export", f"--workdir={run}", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_keras_file_and_a_saved_model(run, tmp_path):
    for form, name in ("keras", "m.keras"), ("saved_model", "m"):
        assert (
            main(["export", f"--workdir={run}", f"--format={form}", f"--to={tmp_path}/{name}"]) == 0
        )
