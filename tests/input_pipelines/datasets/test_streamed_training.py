"""A run on streamed images, with MixUp, that is stopped and resumed."""

import json
import os

import pytest

from tests.support.data import data_sets
from tftpu.launch import main

CONFIG = """
from tftpu.config import Experiment, TrainConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages
from tftpu.models.sizes import ResNet

def get_config():
    return Experiment(
        model=ResNet(
            blocks=(1,), width=8, bottleneck=False, stem="small", image_size=8, num_classes=10,
            norm_batch=4,
        ),
        data=StreamedImages(
            format="tfrecord", data_dir={folder!r}, image_size=8, num_classes=10,
            global_batch_size=8, eval_split="train", augment=Augment(mixup=0.2),
        ),
        train=TrainConfig(steps=6, steps_per_loop=2, log_every=2, checkpoint_every=2),
    )
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed")
    parts = data_sets.split(data_sets.pictures(40), 11, 13, 9, 7)
    data_sets.shards(folder, data_sets.IMAGES, {"train": parts})
    path = folder / "own.py"
    path.write_text(CONFIG.format(folder=str(folder)))
    return path


def losses(workdir) -> list[tuple]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["split"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(config, tmp_path):
    def train(workdir: str, steps: int) -> None:
        overrides = [f"--config.train.steps={steps}", "--config.optimizer.decay=constant"]
        where = [f"--config={config}", f"--workdir={tmp_path / workdir}", "--virtual_devices=2"]
        assert main.main(["train", *where, *overrides]) == 0

    train("whole", 6)
    train("parts", 2)
    train("parts", 6)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    trained = [line for line in whole if line[1] == "train"]
    assert trained == [line for line in parts if line[1] == "train"] and trained[-1][0] == 6
    assert whole[-1] == parts[-1]
    assert os.path.exists(tmp_path / "parts" / "config.json")
