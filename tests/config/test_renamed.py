"""Old names of configs: in code they name the new ones, and workdirs that hold them still open."""

import json
import sys

import pytest

import tftpu
from tftpu.config import from_json, renamed
from tftpu.launch.settings import config_flags

# As `tftpu train --config=digits_resnet --tpu=none` wrote it while the classes had other names.
RECORDED = """
{"class": "tftpu.config.experiment.Experiment", "model": {"class": "tftpu.models.sizes.ResNet",
"name": "digits_resnet", "init_from": "", "freeze": "", "lora": 0, "lora_targets": "",
"lora_base": "", "blocks": [1, 1, 1], "width": 32, "bottleneck": false, "stride_in": "3x3",
"stem": "small", "image_size": 8, "channels": 1, "num_classes": 10, "norm_batch": 16, "dropout":
0.0, "remat": "none"}, "data": {"class": "tftpu.input_pipelines.sources.Images", "name": "digits",
"global_batch_size": 128, "data_dir": null, "image_size": 8, "channels": 1, "train_split":
"train", "eval_split": "test", "shift": 1}, "optimizer": {"class":
"tftpu.config.experiment.Optimizer", "name": "sgd", "learning_rate": 0.1, "scaling": "none",
"base_batch_size": 256, "warmup_steps": 50, "decay": "cosine", "end_factor": 0.0, "decay_power":
2.0, "decay_steps": [], "decay_rate": 0.1, "weight_decay": 0.0005, "momentum": 0.9, "nesterov":
true, "beta_2": 0.999}, "loss": null, "metrics": [], "weighted_metrics": [], "callbacks": [],
"train": {"class": "tftpu.config.options.Train", "steps_per_loop": 20, "log_every": 60,
"checkpoint_every": 20, "checkpoint_minutes": 0.0, "keep": 3, "keep_every": 0, "grace_seconds":
25.0, "watchdog_seconds": null, "best_metric": "accuracy", "gradient_accumulation_steps": 1,
"global_clipnorm": null, "ema_momentum": null, "seed": 0, "profile": "", "writers": [], "on_nan":
"stop", "max_rollbacks": 3, "steps": 40, "epochs": null, "eval_every": 20, "label_smoothing": 0.1,
"precision": "auto"}, "cluster": {"class": "tftpu.config.experiment.Cluster", "tpu": "none",
"virtual_devices": null, "engine": "auto", "mesh": null, "compiler_options": "auto",
"host_timeout": 30.0}, "config_file": ""}
"""
CHANGES = (
    *("train.steps=40", "train.eval_every=20", "train.checkpoint_every=20"),
    *("train.checkpoint_minutes=0", "cluster.tpu=none"),
)


@pytest.mark.parametrize("module", ["tftpu", "tftpu.config"])
@pytest.mark.parametrize("name", ["Cluster", "Data", "Model", "Optimizer", "Train", "TrainOptions"])
def test_an_old_name_is_an_error_that_names_the_new_one(module, name):
    new = "TrainConfig" if name == "TrainOptions" else f"{name}Config"
    with pytest.raises(AttributeError, match=rf"{module}\.{name} is now {module}\.{new}; likewise"):
        getattr(sys.modules[module], name)
    with pytest.raises(ImportError, match=rf"{module}\.{name} is now {module}\.{new}; likewise"):
        exec(f"from {module} import {name}")


def test_other_names_that_are_missing_stay_what_they_were():
    with pytest.raises(AttributeError, match=r"module 'tftpu' has no attribute 'Nonexistent'$"):
        tftpu.Nonexistent  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nonexistent' from 'tftpu'"):
        exec("from tftpu import Nonexistent")


def test_a_recorded_experiment_of_the_old_names_is_read():
    wanted = config_flags.load("digits_resnet", [f"--config.{change}" for change in CHANGES])
    assert from_json(RECORDED) == wanted


def test_only_classes_of_configs_are_renamed():
    assert renamed.update_class("tftpu.config.options.Train") == "tftpu.config.options.TrainConfig"
    for path in ("mine.Train", "tftpu.models.sizes.Model", "Train", "tftpu.configs.options.Train"):
        assert renamed.update_class(path) == path
    flat = {"train.class": "tftpu.config.options.Train", "train.steps": 5}
    assert renamed.update_classes(flat)["train.class"] == "tftpu.config.options.TrainConfig"
    description = {"class_name": "tftpu.config.options.Train", "config": {"name": "Train"}}
    assert renamed.update_classes(description) == description
    updated = json.dumps(renamed.update_classes(json.loads(RECORDED)))
    assert 'Train"' not in updated and from_json(updated) == from_json(RECORDED)
