"""Steps and pipelines for Kubeflow Pipelines: conditions, what is compiled, and real local runs.

Kubeflow's own runner executes the compiled pipeline here, each step in its own process.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.support.data import photos

pytest.importorskip("kfp", reason="not beside TensorFlow 2.19, which holds protobuf too low")
from kfp import compiler, dsl, local

from tftpu.errors import UserError
from tftpu.launch import kfp
from tftpu.launch.commands.finished import evaluate as command
from tftpu.launch.kfp import steps
from tftpu.launch.run.conditions import find_unmet

SHORT = "--config.train.steps=6 --config.train.eval_every=6"
PHOTOS = '''"""Photographs of three kinds."""
import dataclasses
import tftpu
from tftpu.input_pipelines.sources import StreamedImages


@dataclasses.dataclass
class Net(tftpu.ModelConfig):
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
    assert find_unmet(condition, METRICS) == reasons


@pytest.mark.parametrize(
    "condition", ["", "accuracy", "accuracy>0.9", "accuracy>=high", "accuracy>=nan", "a>=1,"]
)
def test_what_is_no_condition_is_not_met_by_chance(condition):
    with pytest.raises(ValueError, match="is not METRIC>=NUMBER or METRIC<=NUMBER"):
        find_unmet(condition, METRICS)


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path):
    path = tmp_path / "new" / "metrics.json"
    command._write(str(path), 7, {"loss": float("nan"), "accuracy": 0.5})
    written = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert written == {"step": 7, "metrics": {"loss": None, "accuracy": 0.5}}
    with pytest.raises(UserError, match="cannot be written"):
        command._write(str(path / "below"), 7, {})


def compiled(tmp_path, *args, **keywords) -> dict:
    path = tmp_path / "pipeline.yaml"
    compiler.Compiler().compile(kfp.training_pipeline(*args, **keywords), str(path))
    return yaml.safe_load(path.read_text())


def given(task: dict) -> dict[str, str]:
    """Returns the constants that a task gets."""
    values = task["inputs"]["parameters"]
    return {k: v["runtimeValue"]["constant"] for k, v in values.items() if "runtimeValue" in v}


FOLDER = "{{$.inputs.parameters['pipelinechannel--new-run-Output']}}"


@pytest.mark.medium
def test_the_compiled_pipeline_has_the_steps_in_their_order(tmp_path):
    spec = compiled(tmp_path, "registry/image:1", source="images:photos", predict="evaluation")
    tasks = spec["root"]["dag"]["tasks"]
    before = {name: set(task.get("dependentTasks", [])) for name, task in tasks.items()}
    assert before == {
        "new-run": set(),
        "convert": {"new-run"},
        "check": {"new-run", "convert"},
        "train": {"new-run", "check"},
        "evaluate": {"new-run", "train"},
        "gate": {"evaluate"},
        "export": {"new-run", "gate"},
        "predict": {"new-run", "gate"},
    }
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == {"config", "workdir", "gate", "overrides"}
    images = [e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()]
    assert images == ["registry/image:1"] * 8
    assert not any(task["cachingOptions"] for task in tasks.values())
    assert given(tasks["check"])["data_dir"] == given(tasks["train"])["data_dir"]
    condition = tasks["check"]["inputs"]["parameters"]["condition"]
    assert condition == {"componentInputParameter": "gate"}
    assert given(tasks["train"])["data_dir"] == given(tasks["convert"])["output"]
    assert given(tasks["export"])["output"] == f"{FOLDER}/export"
    kinds = {
        name: {o["artifactType"]["schemaTitle"] for o in part["artifacts"].values()}
        for name, component in spec["components"].items()
        if "artifacts" in (part := component.get("outputDefinitions", {}))
    }
    assert kinds == {
        "comp-convert": {"system.Dataset"},
        "comp-train": {"system.Model"},
        "comp-evaluate": {"system.Metrics"},
        "comp-export": {"system.Model"},
        "comp-predict": {"system.Dataset"},
    }


@pytest.mark.medium
def test_a_placeholder_of_the_run_is_the_whole_value_of_a_parameter(tmp_path):
    """Kubeflow's driver replaces nothing else (`resolve.go`), and all runs would share a folder."""
    spec = compiled(tmp_path, source="images:photos", predict="evaluation", search=["a.b=log:1..2"])
    constants = [c for task in spec["root"]["dag"]["tasks"].values() for c in given(task).values()]
    named = [text for text in constants if "{{$.pipeline_" in str(text)]
    assert named == ["{{$.pipeline_job_uuid}}"]


def test_an_artifact_keeps_the_address_that_kubeflow_gave_it(tmp_path, capfd):
    """Its launcher refuses to upload one whose address is outside of the pipeline's root."""
    artifact = dsl.Model(uri=str(tmp_path / "artifact"))
    steps._write_place(artifact, "gs://bucket/run", config="digits")
    assert artifact.uri == str(tmp_path / "artifact")
    assert artifact.metadata == {"place": "gs://bucket/run", "config": "digits"}
    assert Path(artifact.path).read_text() == "gs://bucket/run\n"
    code = Path(steps.__file__).read_text()
    assert not re.search(r"\.uri\b", code)


@pytest.mark.medium
def test_a_search_comes_before_the_training_and_gives_it_the_best_values(tmp_path):
    tasks = compiled(tmp_path, search=["model.width=choice:8,16"])["root"]["dag"]["tasks"]
    assert set(tasks["search"]["dependentTasks"]) == {"new-run", "check"}
    best = tasks["train"]["inputs"]["parameters"]["best"]["taskOutputParameter"]
    assert best["producerTask"] == "search"
    assert tasks["search"]["retryPolicy"] == tasks["train"]["retryPolicy"]
    assert given(tasks["search"])["workdir"] == f"{FOLDER}/search"
    with pytest.raises(UserError, match="is a text: give a list"):
        kfp.training_pipeline(search="model.width=choice:8,16")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"condition": "accuracy>0.9"}, "The gate 'accuracy>0.9' cannot be read"),
        ({"workdir": 'gs://b/"x"'}, "contains a quote or a backslash"),
    ],
)
def test_a_run_with_a_mistake_is_refused_before_anything_is_done(given, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        steps.new_run.python_func(**{"workdir": "runs", "run": "7", **given})


def test_a_run_has_a_folder_of_its_own():
    found = steps.new_run.python_func(workdir="gs://b/runs/", run="7-f", condition="loss<=1")
    assert found == "gs://b/runs/7-f"


def test_flags_that_cannot_be_read_end_the_step_with_the_reason():
    with pytest.raises(SystemExit, match="of tftpu train cannot be read: No closing"):
        steps._run_tftpu(["train"], "--a='b", "")


@pytest.mark.medium
def test_a_step_that_is_stopped_lets_its_training_save(tmp_path):
    """The training is a script here, which says what it received."""
    program = Path(sys.executable).parent / "tftpu"
    fake = "trap 'echo saved; exit 75' TERM; echo begun; for i in $(seq 600); do sleep 0.1; done"
    code = (
        "import os, sys, subprocess\nfrom tftpu.launch.kfp import steps\n"
        f"real = subprocess.Popen\nassert os.path.exists({str(program)!r})\n"
        f"subprocess.Popen = lambda command: real(['bash', '-c', {fake!r}])\n"
        "steps._run_tftpu(['train', '--workdir=x'], '', '')\n"
    )
    step = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert step.stdout is not None
    while step.stdout.readline() != "begun\n":
        assert step.poll() is None
    step.send_signal(signal.SIGTERM)
    out, said = step.communicate(timeout=60)
    assert (step.returncode, out) == (75, "saved\n")
    assert "tftpu train ended with exit code 75" in said


@pytest.mark.medium
def test_a_step_that_fails_shows_the_message_of_the_command(folder, capfd):
    with pytest.raises(RuntimeError, match="check"):
        kfp.check(config="digits_resnat")
    said = capfd.readouterr().out
    assert "Did you mean 'digits_resnet'?" in said
    assert "tftpu data check ended with exit code 2" in said
    with pytest.raises(RuntimeError, match="check"):
        kfp.check(config="digits_resnet", condition="acuracy>=0.9")
    assert (
        "--gate=acuracy: the evaluation of Images has only loss, accuracy."
        in capfd.readouterr().out
    )


@pytest.mark.exhaustive
def test_a_good_model_is_exported_and_one_that_is_not_is_not(folder, capfd):
    run = folder / "runs" / "digits"

    @dsl.pipeline
    def digits(workdir: str, gate: str):
        """Trains the digits with the best of two learning rates for a gate that they pass."""
        search = {"space": ["optimizer.learning_rate=log:0.01..1"], "trials": 2}
        searched = kfp.search(
            config="digits_resnet", workdir=f"{workdir}/search", overrides=SHORT, **search
        )
        found = {"overrides": SHORT, "best": searched.output}
        trained = kfp.train(config="digits_resnet", workdir=workdir, **found)
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


@pytest.mark.exhaustive
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
