"""Runs of KerasHub's models from a config: every command on them, and a run that is killed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import warm
from tests.support.hub.tiny_gemma3 import build_tiny_gemma3, write_texts
from tftpu.checkpoint import manifest
from tftpu.launch.main import main

pytestmark = pytest.mark.slow
STEPS = 300
CONFIG = """
import tftpu
from tftpu.config import OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Texts


def get_config():
    return tftpu.Experiment(
        model=tftpu.KerasHub("PRESET", task="causal_lm", lora=4, sequence_length=16),
        data=Texts(train_text="TEXTS", global_batch_size=16),
        optimizer=OptimizerConfig(name="adam", learning_rate=0.01, warmup_steps=0),
        train=TrainConfig(
            steps=300, steps_per_loop=10, log_every=10, eval_every=0, checkpoint_every=10
        ),
    )
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """Returns the file of a config whose preset lies beside it."""
    folder = tmp_path_factory.mktemp("hub")
    build_tiny_gemma3().save_to_preset(str(folder / "gemma3"))
    texts = write_texts(folder / "texts.txt")
    path = folder / "tiny.py"
    path.write_text(CONFIG.replace("PRESET", str(folder / "gemma3")).replace("TEXTS", str(texts)))
    return path


@pytest.fixture(scope="module")
def run(config) -> Path:
    """Returns the workdir of a run that trained adapters without interruption."""
    workdir = config.parent / "whole"
    assert main(["train", str(config), f"--workdir={workdir}", "--tpu=none"]) == 0
    return workdir


def read_losses(workdir: Path) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def read_text(capsys, *words: str) -> str:
    assert main(["generate", *words, "--temperature=0", "--tokens=12", "--tpu=none"]) == 0
    return capsys.readouterr().out


def test_checkpoints_hold_the_adapters_alone(run):
    found = load_file(run / "checkpoints" / str(STEPS) / "model.safetensors")
    assert found and all("lora_kernel" in name for name in found)
    losses = read_losses(run)
    assert losses[STEPS] < 0.75 * losses[10]


@pytest.mark.parametrize("engine", ["tensorflow", "jax"])
def test_a_killed_run_resumes_to_the_same_numbers(engine, config, run, tmp_path):
    flags = [f"--config.cluster.engine={engine}", "--config.cluster.tpu=none"]
    words = [sys.executable, "-m", "tftpu.launch.main", "train", str(config), *flags]
    environment = {**os.environ, "KERAS_BACKEND": engine}
    workdir = tmp_path / "killed"
    killed = warm.Popen([*words, f"--workdir={workdir}"], env=environment)
    while not manifest.list_steps(str(workdir / "checkpoints")):
        time.sleep(0.01)
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert max(manifest.list_steps(str(workdir / "checkpoints"))) < STEPS
    assert warm.run([*words, f"--workdir={workdir}"], env=environment).returncode == 0
    whole = run
    if engine == "jax":
        whole = tmp_path / "whole"
        assert warm.run([*words, f"--workdir={whole}"], env=environment).returncode == 0
        assert read_losses(whole)[STEPS] == pytest.approx(read_losses(run)[STEPS], rel=1e-3)
    theirs, ours = (
        load_file(one / "checkpoints" / str(STEPS) / "model.safetensors")
        for one in (whole, workdir)
    )
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs | ours)


def test_texts_are_continued_with_and_without_the_adapters(run, capsys, config):
    import keras_hub

    with_adapters = read_text(capsys, str(run), "--prompt=the quick brown fox")
    base = read_text(capsys, str(run), "--prompt=the quick brown fox", "--base")
    assert with_adapters.startswith("the quick brown fox") and with_adapters != base
    task = keras_hub.models.CausalLM.from_preset(str(config.parent / "gemma3"))
    length = len(task.preprocessor.tokenizer("the quick brown fox")) + 1
    task.compile(sampler="greedy")
    assert base == task.generate("the quick brown fox", max_length=length + 12) + "\n"


def test_evaluation_exports_and_the_server_see_the_adapters(run, capsys, tmp_path):
    from tftpu.inference.server.text import Language
    from tftpu.launch.run import serving
    from tftpu.launch.run.finished import FinishedRunOptions

    assert main(["evaluate", str(run), "--tpu=none"]) == 0
    assert "sparse_categorical_accuracy" in capsys.readouterr().out
    for name in ("exported", "exported.keras"):  # each is compared with the model
        assert main(["export", str(run), f"--output={tmp_path / name}"]) == 0
    assert "import keras.models, keras_hub; " in capsys.readouterr().out
    assert main(["export-weights", str(run), "--adapters", f"--output={tmp_path / 'peft'}"]) == 0
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["r"] == 8  # two heads
    limits = serving.LanguageOptions(None, None, None)
    served = serving.restore_served_run(str(run), FinishedRunOptions(config=None), limits)
    assert isinstance(served.model, Language) and served.step == STEPS
    found = served.model.encode("the quick")
    assert found[0] == 2  # the token that begins a text
    assert served.model.decoder([])(found) == "the quick"


def test_mistakes_are_explained(config, tmp_path, capsys):
    words = ["train", str(config), f"--workdir={tmp_path / 'run'}", "--tpu=none"]
    for flag, said in {
        "--config.model.preset=gemma3_1bb": "Did you mean 'gemma3_1b'?",
        "--config.model.task=causal_ml": "KerasHub has no such task. Did you mean 'CausalLM'?",
        "--config.data.train_text=nothing.txt": "There is no file 'nothing.txt'",
        "--config.model.weights=some": "model.weights is 'some'",
        "--config.model.init_from=runs/x": "name the preset",
    }.items():
        assert main([*words, flag]) == 2
        assert said in capsys.readouterr().err
