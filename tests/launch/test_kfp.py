"""Steps and pipelines for Kubeflow Pipelines: conditions, what is compiled, and real local runs.

Kubeflow's own runner executes the compiled pipeline here, each step in a process of its own.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.support import photos

pytest.importorskip("kfp", reason="not beside TensorFlow 2.19, which holds protobuf too low")
from kfp import compiler, dsl, local

from tftpu.errors import UserError
from tftpu.launch import kfp
from tftpu.launch.commands import evaluate as command
from tftpu.launch.kfp.conditions import unmet

SHORT = "--config.train.steps=6 --config.train.eval_every=6"
PHOTOS = '''"""Photographs of three kinds."""
import dataclasses
import tftpu
from tftpu.input_pipelines.sources import StreamedImages


@dataclasses.dataclass
class Net(tftpu.Model):
    def build(self):
        from keras import Input, Sequential, layers

        return Sequential([Input((32, 32, 3)), layers.Flatten(), layers.Dense(3)])


def get_config():
    size = dict(image_size=32, num_classes=3, global_batch_size=8)
    data = StreamedImages(format="folder", data_dir="elsewhere", eval_split="val", **size)
    return tftpu.Experiment(Net(), data, optimizer="adam")
'''
METRICS = {"loss": 0.5, "accuracy": 0.9, "perplexity": None}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Runs pipelines in a scratch folder, by Kubeflow's runner of this environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "artifacts"))
    return tmp_path


@pytest.mark.parametrize(
    ("condition", "reasons"),
    [
        ("accuracy>=0.9", []),
        ("accuracy >= 0.9, loss <= 5e-1", []),
        ("loss<=inf", []),
        ("accuracy>=0.91", ["accuracy is 0.9, less than 0.91"]),
        ("loss<=.4,accuracy<=0", ["loss is 0.5, more than 0.4", "accuracy is 0.9, more than 0"]),
        ("perplexity<=inf", ["perplexity is not a finite number"]),
        ("auc>=0.5", ["there is no metric auc, only loss, accuracy, perplexity"]),
    ],
)
def test_a_condition_is_met_or_says_why_not(condition, reasons):
    assert unmet(condition, METRICS) == reasons


@pytest.mark.parametrize(
    "condition", ["", "accuracy", "accuracy>0.9", "accuracy>=high", "accuracy>=nan", "a>=1,"]
)
def test_what_is_no_condition_is_not_met_by_chance(condition):
    with pytest.raises(ValueError, match="is not METRIC>=NUMBER or METRIC<=NUMBER"):
        unmet(condition, METRICS)


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path):
    path = tmp_path / "new" / "metrics.json"
    command._write(str(path), 7, {"loss": float("nan"), "accuracy": 0.5})
    written = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert written == {"step": 7, "metrics": {"loss": None, "accuracy": 0.5}}
    with pytest.raises(UserError, match="cannot be written"):
        command._write(str(path / "below"), 7, {})


def test_the_compiled_pipeline_has_the_steps_in_their_order(tmp_path):
    path = tmp_path / "pipeline.yaml"
    made = kfp.training_pipeline("registry/image:1", source="images:photos", predict="evaluation")
    compiler.Compiler().compile(made, str(path))
    spec = yaml.safe_load(path.read_text())
    tasks = spec["root"]["dag"]["tasks"]
    assert {name: task.get("dependentTasks", []) for name, task in tasks.items()} == {
        "convert": [],
        "check": ["convert"],
        "train": ["check"],
        "evaluate": ["train"],
        "gate": ["evaluate"],
        "export": ["gate"],
        "predict": ["gate"],
    }
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == {"config", "workdir", "gate", "overrides"}
    images = [e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()]
    assert images == ["registry/image:1"] * 7
    assert not any(task["cachingOptions"] for task in tasks.values())
    kinds = {
        name: {o["artifactType"]["schemaTitle"] for o in part["artifacts"].values()}
        for name, component in spec["components"].items()
        if (part := component.get("outputDefinitions"))
    }
    assert kinds == {
        "comp-convert": {"system.Dataset"},
        "comp-train": {"system.Model"},
        "comp-evaluate": {"system.Metrics"},
        "comp-export": {"system.Model"},
        "comp-predict": {"system.Dataset"},
    }


def test_a_search_comes_before_the_training_and_sets_its_overrides(tmp_path):
    path = tmp_path / "pipeline.yaml"
    compiler.Compiler().compile(
        kfp.training_pipeline(search=["model.width=choice:8,16"]), str(path)
    )
    tasks = yaml.safe_load(path.read_text())["root"]["dag"]["tasks"]
    assert tasks["search"]["dependentTasks"] == ["check"]
    assert tasks["train"]["dependentTasks"] == ["search"]
    overrides = tasks["train"]["inputs"]["parameters"]["overrides"]["runtimeValue"]["constant"]
    assert overrides.endswith("{{$.inputs.parameters['pipelinechannel--search-Output']}}")


def test_a_step_that_fails_shows_the_message_of_the_command(folder, capfd):
    with pytest.raises(RuntimeError, match="check"):
        kfp.check(config="digits_resnat")
    said = capfd.readouterr().out
    assert "Did you mean 'digits_resnet'?" in said
    assert "tftpu data check ended with exit code 2" in said
    with pytest.raises(RuntimeError, match="check"):
        kfp.check(config="digits_resnet", condition="accuracy>0.9")
    assert "The gate 'accuracy>0.9' cannot be read" in capfd.readouterr().out


@pytest.mark.slow
def test_a_good_model_is_exported_and_one_that_is_not_is_not(folder, capfd):
    run = folder / "runs" / "digits"

    @dsl.pipeline
    def digits(workdir: str, gate: str):
        """Trains the digits with the best of two learning rates for a gate that they pass."""
        search = {"space": ["optimizer.learning_rate=log:0.01..1"], "trials": 2}
        searched = kfp.search(
            config="digits_resnet", workdir=f"{workdir}/search", overrides=SHORT, **search
        )
        best = f"{SHORT} {searched.output}"
        trained = kfp.train(config="digits_resnet", workdir=workdir, overrides=best)
        evaluated = kfp.evaluate(workdir=workdir).after(trained)
        passed = kfp.gate(metrics=evaluated.outputs["metrics"], condition=gate)
        kfp.export(workdir=workdir, output=f"{workdir}/export").after(passed)

    digits(workdir=str(run), gate="accuracy>=0,loss<=inf")
    served = tf.saved_model.load(str(run / "export")).signatures["serving_default"]
    found = served(tf.zeros((2, 8, 8, 1), tf.uint8))
    assert found["logits"].shape == (2, 10) and np.isfinite(found["logits"]).all()
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 6
    best = json.loads((run / "search" / "result.json").read_text())["best"]["overrides"]
    rate = json.loads((run / "config.json").read_text())["optimizer"]["learning_rate"]
    assert best == [f"--config.optimizer.learning_rate={rate:g}"]
    capfd.readouterr()

    @dsl.pipeline
    def again(workdir: str):
        """Evaluates the run once more, for a gate that it cannot pass."""
        evaluated = kfp.evaluate(workdir=workdir)
        passed = kfp.gate(metrics=evaluated.outputs["metrics"], condition="accuracy>=1.5")
        kfp.export(workdir=workdir, output=f"{workdir}/better").after(passed)

    with pytest.raises(RuntimeError, match="gate"):
        again(workdir=str(run))
    said = capfd.readouterr().out
    assert "The gate accuracy>=1.5 is not met, so nothing follows: accuracy is " in said
    assert "less than 1.5" in said and not (run / "better").exists()
    recorded = json.loads(next(folder.glob("artifacts/again*/evaluate/metrics")).read_text())
    assert recorded["step"] == 6 and f"accuracy={recorded['metrics']['accuracy']}" in said


@pytest.mark.slow
def test_a_source_is_converted_trained_and_predicted(folder):
    for split, count in (("train", 16), ("val", 8)):
        for seed, kind in enumerate(("bird", "cat", "dog")):
            place = folder / "photos" / split / kind
            place.mkdir(parents=True)
            for index in range(count):
                image = photos.pixels(40, 40, seed=100 * seed + index)
                (place / f"{index}.jpg").write_bytes(photos.encoded(image))
    (folder / "mine.py").write_text(PHOTOS)
    made = kfp.training_pipeline(source=f"images:{folder / 'photos'}", predict="evaluation")
    made(
        config=str(folder / "mine.py"),
        workdir=str(folder / "runs"),
        gate="loss<=inf",
        overrides=f"--config.data.format=tfrecord {SHORT}",
    )
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "data" / "dataset.json").read_text())
    assert (run / "export" / "saved_model.pb").exists()
    shards = sorted((run / "predictions").glob("*.jsonl"))
    assert sum(len(shard.read_text().splitlines()) for shard in shards) == 3 * 8
