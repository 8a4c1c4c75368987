"""The configs that come with tftpu, end to end on real data."""

import json
import math
import re
import sys

import numpy as np
import pytest

import tftpu
from tests.support import warm
from tftpu import input_pipelines
from tftpu.input_pipelines.datasets import tfds
from tftpu.launch.run import experiment
from tftpu.launch.settings import config_flags


def command(*arguments: str) -> str:
    done = warm.run(
        [sys.executable, "-m", "tftpu.launch.main", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_resnet_reaches_its_accuracy_on_all_test_images(seed, tmp_path):
    said = command(
        "train",
        "--config=digits_resnet",
        f"--config.train.seed={seed}",
        f"--workdir={tmp_path}",
    )
    accuracy = float(re.search(r"  eval, last .*accuracy ([0-9.]+)", said).group(1))
    assert accuracy >= 0.985
    assert round(accuracy * 360, 1) == pytest.approx(round(accuracy * 360), abs=0.05)  # all 360
    assert re.search(r"  speed +[0-9,]+ examples/s", said)
    assert f"tensorboard --logdir={tmp_path}" in said
    for made in ("config.json", "metrics.jsonl", "checkpoints/best", "train", "eval"):
        assert (tmp_path / made).exists()
    if seed == 0:
        evaluated = command("evaluate", f"--workdir={tmp_path}", "--virtual_devices=2")
        best = json.loads((tmp_path / "checkpoints/best").read_text())
        assert evaluated.startswith(f"step {best['step']}  ")
        assert f"accuracy {best['value']:.4f}" in evaluated


@pytest.mark.exhaustive  # README's own command is run with its other blocks, for fewer steps
def test_digits_resnet_trains_on_eight_replicas(tmp_path):
    said = command(
        "train",
        "--config=digits_resnet",
        "--virtual_devices=8",
        "--config.train.steps=60",
        "--config.train.eval_every=0",
        "--config.train.checkpoint_every=0",
        f"--workdir={tmp_path}",
    )
    assert "8 replicas" in said
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open()]
    assert losses[-1] < 2.0  # the logarithm of 10 classes is 2.3


def bigram_bits_per_byte(train: list[bytes], test: list[bytes]) -> float:
    """Returns the cross-entropy of the add-one smoothed bigram model of `train`, in closed form."""
    counts = np.ones((256, 256))
    for document in train:
        text = np.frombuffer(document, np.uint8)
        np.add.at(counts, (text[:-1], text[1:]), 1)
    bits = -np.log2(counts / counts.sum(1, keepdims=True))
    total = pairs = 0
    for document in test:
        text = np.frombuffer(document, np.uint8)
        total += bits[text[:-1], text[1:]].sum()
        pairs += len(text) - 1
    return total / pairs


def documents(split: str) -> list[bytes]:
    builder = tfds.open_builder("python_source", None)
    return [d["text"] for d in builder.as_dataset(split=split).as_numpy_iterator()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "steps",
    [150, 600],  # a quarter of the config's, and these
)
def test_python_gpt_beats_the_bigram_model(steps, tmp_path):
    said = command(
        "train",
        "--config=python_gpt",
        f"--config.train.steps={steps}",
        f"--config.train.eval_every={steps}",
        f"--workdir={tmp_path}",
    )
    bits = float(re.search(r"  eval, last .*bits_per_token ([0-9.]+)", said).group(1))
    loss = float(re.search(r"  eval, last .*loss ([0-9.]+)", said).group(1))
    assert bits == pytest.approx(loss / math.log(2), abs=2e-3)
    assert bits < bigram_bits_per_byte(documents("train"), documents("test"))
    sample = said.split("A sample of what it writes:\n")[1].split("\nDone:")[0]
    assert sample.startswith("def ") and len(sample) > 100


@pytest.mark.exhaustive  # the step of every family is compared on eight elsewhere
def test_python_gpt_trains_on_eight_replicas():
    settings = config_flags.load("python_gpt", ["--config.model.layers=1"])
    with tftpu.connect(virtual_devices=8).scope():
        trainer = experiment.build_trainer(settings, None)
    losses = trainer.fit(experiment.build_training_data(settings), steps=30).history["loss"]
    assert losses[-1] < math.log(256)


@pytest.mark.medium
def test_no_text_is_in_both_splits():
    train, test = (set(documents(split)) for split in ("train", "test"))
    assert len(train) > 300 and len(test) > 5
    assert not train & test


def test_every_byte_but_the_first_of_a_document_is_predicted_once():
    settings = config_flags.load("python_gpt", []).data
    predicted = weight = 0
    for _, labels, weights in input_pipelines.evaluation(settings).as_numpy_iterator():
        predicted += int((labels * weights).sum())
        weight += int(weights.sum())
    test = documents("test")
    assert weight == sum(len(document) - 1 for document in test)
    assert predicted == sum(sum(document[1:]) for document in test)
