"""Plans three trainings that people ask about, as `tftpu plan` does, within a time limit each.

    python -m tests.benchmarks.compiled.plans FOLDER [8b|gemma|resnet50 ...] [--time_limit=20m]

Llama 3.1 8B with 24 x 8,192 tokens on a v6e-8; Gemma 3 12B by LoRA, 1,000 steps of 8 x 4,096
tokens for 20 dollars; ResNet-50 on ImageNet within 12 hours. The folder gets the configs, a preset
with Gemma's sizes and no weights, and the plans, which a second call continues.

Evidence: compiled.
"""

import json
import os

os.environ["KERAS_BACKEND"] = "jax"

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.compiled.keras_hub.gemma import GEMMA3_1B, LORA
from tests.support.hub.tiny_gemma3 import build_tiny_gemma3, write_texts

LLAMA = """
from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Tokens


def get_config():
    return Experiment(
        model=models.config("llama_8b", context=8192),
        data=Tokens(data_dir="text", context=8192, global_batch_size=24),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-4),
        train=TrainConfig(steps=1000),
    )
"""
GEMMA = """
import tftpu
from tftpu.config import OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Texts


def get_config():
    return tftpu.Experiment(
        model=tftpu.KerasHub("preset", task="causal_lm", weights="none", lora=8),
        data=Texts(train_text="tales.txt", global_batch_size=8),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-4),
        train=TrainConfig(steps=1000, scan="block"),
    )
"""
TOKENS = 4096  # of an example of Gemma
PLANS = {
    "8b": ["llama8b.py", "--slices=v6e-8"],
    "gemma": ["gemma12b.py", "--slices=v5e-8,v6e-8", "--budget=20"],
    "resnet50": ["resnet50_imagenet", "--slices=v5e-8,v3-32,v5e-16", "--deadline=12h"],
}


def main(folder: str, *arguments: str) -> None:
    """Writes the files that are missing, and runs the plans one after the other."""
    limit = [word for word in arguments if word.startswith("--")] or ["--time_limit=20m"]
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "llama8b.py").write_text(LLAMA)
    (place / "gemma12b.py").write_text(GEMMA)
    write_texts(place / "tales.txt")
    chosen = [word for word in arguments if word not in limit] or [*PLANS]
    if "gemma" in chosen and not (place / "preset").exists():
        write_preset(place / "preset")
    for name in chosen:
        command = [sys.executable, "-m", "tftpu.launch.main", "plan", *PLANS[name], *limit]
        subprocess.run(command, cwd=place, check=False)


def write_preset(path: Path) -> None:
    """Writes a preset without weights that has the sizes of Gemma 3 12B and a tiny tokenizer."""
    model = build_tiny_gemma3()
    model.preprocessor.sequence_length = TOKENS
    model.save_to_preset(str(path))
    (path / "model.weights.h5").unlink()
    for name in ("config.json", "task.json"):
        described = json.loads((path / name).read_text())
        backbone = described["config"].get("backbone", described)
        backbone["config"] |= GEMMA3_1B | LORA["12b-lora"][1]
        (path / name).write_text(json.dumps(described))


if __name__ == "__main__":
    main(*sys.argv[1:])
