"""No file that is read runs code: whatever module, class or bytecode it names, nothing executes.

Python's audit events say what runs. Modules that a reader needs are loaded before it is watched.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator

import keras
import numpy as np
import onnx
import pytest

from tests.support.hostile import audit, texts
from tests.support.hostile import configs as hostile_configs
from tests.support.hostile.fuzzing import SECONDS, only_user_errors
from tftpu import models
from tftpu.config import Function, KerasObject, from_json, to_json
from tftpu.errors import UserError
from tftpu.inference.server import served
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.formats import manifest
from tftpu.launch.commands.finished import status
from tftpu.launch.commands.training import search
from tftpu.launch.main import main
from tftpu.launch.run import finished, result
from tftpu.launch.search.plan import Plan
from tftpu.launch.settings import config_flags, keras_objects, own_code
from tftpu.models.weights import files as weights


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Returns the place of a file that hostile code would create; its modules can be imported."""
    place = hostile_configs.write_modules(tmp_path / "modules")
    monkeypatch.syspath_prepend(place.parent)
    return place


def whole() -> dict:
    """Returns a config.json with all kinds of objects."""
    metric = keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="m")
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    described = [
        KerasObject(keras.saving.serialize_keras_object(value))
        for value in (keras.optimizers.Adam(rate), keras.losses.CategoricalCrossentropy(), metric)
    ]
    found = dataclasses.replace(
        config_flags.load("python_gpt", ["--config.model.layers=1", "--config.model.width=8"]),
        optimizer=described[0],
        loss={"a": described[1], "b": [Function("keras.src.losses.losses.mean_squared_error")]},
        metrics=(described[2], "accuracy"),
        callbacks=(KerasObject({"module": "a", "class_name": "B", "config": {}}),),
        config_file="/nowhere/mine.py",
    )
    return json.loads(to_json(found))


def opened(workdir) -> None:
    """Reads the experiment of a workdir, and makes the Keras objects that it describes."""
    found = finished.load_experiment(str(workdir))
    assert not getattr(found.data, "transform_graph", ""), "TensorFlow would run it"
    keras_objects.build_optimizer(found, lambda *_: None)
    for name in ("loss", "metrics", "weighted_metrics"):
        keras_objects.build_objects(getattr(found, name), name)


@pytest.mark.slow
def test_no_config_json_runs_code(tmp_path, ran):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole()))
    opened(tmp_path)
    first = hostile_configs.mutants(whole(), ran, depth=1)
    for mutant in itertools.chain(first, some(whole(), ran, 300)):
        path.write_text(json.dumps(mutant))
        with audit.audited() as found, only_user_errors():
            opened(tmp_path)
        assert not found and not ran.exists(), mutant


KNOWN = """
import keras
import tensorflow as tf
import tftpu
from tftpu.launch.settings import config_flags

def write(*_, path=None):
    if path:
        open(path, "w")

class Writer:
    def __init__(self, *_, path):
        write(path=path)

def get_config():
    print(tf.io.write_file, keras.utils.get_file)
    return config_flags.load("python_gpt", [])
"""
WRITING = (
    *("tensorflow.print", "tensorflow.io.write_file", "keras.utils.get_file", "known.write"),
    "known.Writer",
)


@pytest.mark.medium
def test_no_config_json_calls_functions_of_a_known_config_with_its_arguments(
    tmp_path, ran, monkeypatch
):
    """The config has loaded TensorFlow, and its code names functions that write a file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "known.py").write_text(KNOWN)
    code = own_code.find_code(str(tmp_path / "known.py"))
    assert code
    own_code.import_config(code)
    modules, called = own_code.list_modules(code), 0
    for path, field in itertools.product(WRITING, ("loss", "metrics")):
        for hostile in hostile_configs.values(path, ran):
            with contextlib.suppress(UserError):
                read = from_json(json.dumps(whole() | {field: [hostile]}), *modules)
                (value,) = keras_objects.build_objects(getattr(read, field), field)
                if callable(value):
                    called += 1
                    with contextlib.suppress(Exception):  # it gets numbers for the name of a file
                        value(np.zeros((2, 1)), np.zeros((2, 1)))
            assert not ran.exists(), hostile
    assert called  # such as a loss that prints the labels


def some(value, ran, count: int) -> Iterator:
    """Yields mutants: as many as the default tests try, the same each time, or for FUZZ_SECONDS."""
    every = list(hostile_configs.mutants(value, ran))
    yield from random.Random(0).sample(every, min(count, len(every)))
    end = time.monotonic() + SECONDS
    for mutant in hostile_configs.drawn(value, ran) if SECONDS else ():
        if time.monotonic() > end:
            return
        yield mutant


COMMANDS = (
    *(["evaluate"], ["export", "--to={}/m.onnx"], ["export-weights", "--to={}/w.safetensors"]),
    *(["quantize"], ["serve", "--port=0"], ["predict", "--input=evaluation", "--output={}/p"]),
    ["generate", "--prompt=a"],
)


@pytest.mark.slow
def test_no_command_runs_code_of_a_config_json(tmp_path, ran):
    """In fresh processes, which have not loaded anything: most is refused before TensorFlow is."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    texts = [json.dumps(m) for m in hostile_configs.mutants(whole(), ran, depth=1)]
    texts = random.Random(0).sample(texts, 300 if SECONDS else 80)
    texts = [text for text in texts if is_refused(tmp_path, text)]
    commands = [[word.format(workdir) for word in [*words, "--workdir={}"]] for words in COMMANDS]
    found = run(commands, texts, workdir / "config.json", ran)
    assert not found and not ran.exists(), found[:3]


@pytest.mark.skipif(not SECONDS, reason="takes minutes; `make fuzz` runs it")
def test_no_config_json_that_is_read_runs_code_until_its_command_ends(tmp_path, ran):
    """A tiny run is evaluated: model, data, optimizer, loss and metrics are made and called."""
    flags = ["--config.model.layers=1", "--config.model.width=8", "--config.train.steps=1"]
    workdir = tmp_path / "run"
    assert main(["train", "--config=python_gpt", f"--workdir={workdir}", *flags]) == 0
    file = workdir / "config.json"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    described = [
        dataclasses.asdict(KerasObject(keras.saving.serialize_keras_object(value)))
        for value in (loss, keras.metrics.MeanMetricWrapper(loss.fn, name="m"))
    ]
    kind = f"{KerasObject.__module__}.{KerasObject.__name__}"
    parts = [{"class": kind, **part} for part in described]
    read = json.loads(file.read_text()) | {"loss": parts[0], "metrics": parts[1:]}
    texts = [json.dumps(m) for m in hostile_configs.mutants(read, ran)]
    random.Random(0).shuffle(texts)
    accepted = (text for text in texts if not is_refused(tmp_path, text))
    several = [json.dumps(read), *itertools.islice(accepted, int(SECONDS / 6))]  # of 4 s each
    found = run([["evaluate", f"--workdir={workdir}"]], several, file, ran, strict=False)
    assert not found and not ran.exists(), found[:3]


def is_refused(folder, text: str) -> bool:
    """Returns whether a config.json is refused: one that is not may load data, for seconds."""
    (folder / "config.json").write_text(text)
    try:
        finished.load_experiment(str(folder))
    except UserError:
        return True
    return False


def run(commands, texts, file, ran, strict=True) -> list[str]:
    """Runs commands on each content of a file, a process for each; returns what ran of others.

    If it is strict, each has to end with its answer or a `UserError`. If not, the first content is
    not hostile: what loads with it is not reported.
    """
    job = {"commands": commands, "texts": texts, "file": str(file), "folder": str(ran.parent)}
    job["strict"] = strict
    place = file.with_name("job.json")
    place.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile.audit", str(place)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def readers(folder) -> dict:
    """Returns files of runs, searches, data sets and weights: a place, JSON, and who reads it."""
    checkpoint, account = texts.written(str(folder / "run"))
    tokens = json.loads(texts.tokenizer())
    space = ("optimizer.momentum=uniform:0..1",)
    plan = Plan(config="digits_resnet", overrides=(), space=space, metric="loss", fields={})
    options = search.Options(workdir=str(folder), report=True)
    features = {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {
            "features": {
                "x": {
                    "pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor",
                    "tensor": {"shape": {}, "dtype": "int64", "encoding": "none"},
                }
            }
        },
    }
    inner = features["featuresDict"]["features"]
    legacy = {
        "type": features["pythonClassName"],
        "proto_cls": "tensorflow_datasets.FeaturesDict",
        "content": {"features": inner},
    }
    info = {"name": "own", "version": "1.0.0", "fileFormat": "tfrecord", "splits": []}
    (folder / "own/1.0.0").mkdir(parents=True)
    (folder / "own/1.0.0/dataset_info.json").write_text(json.dumps(info))

    def state() -> None:
        status.read_status(str(folder / "run"))
        result.read(str(folder / "run"))

    def own() -> None:
        tfds.open_builder("own", str(folder))

    return {
        "checkpoint": ("run/checkpoints/2/manifest.json", checkpoint, state),
        "account": ("run/goodput.json", account, state),
        "result": ("run/result.json", {"steps": 2, "evaluation": {"loss": 0.5}}, state),
        "search": (
            "search.json",
            dataclasses.asdict(plan),
            lambda: search._load_plan(options, str(folder)),
        ),
        "data set": (
            manifest.NAME,
            json.loads(texts.WHOLE),
            lambda: manifest.read(str(folder)),
        ),
        "tokenizer": ("t.json", tokens, lambda: packing.build_tokenizer(f"{folder}/t.json")),
        "index": (
            "model.safetensors.index.json",
            {"metadata": {}, "weight_map": {"a": "w.safetensors"}},
            lambda: weights.read(f"{folder}/model.safetensors.index.json"),
        ),
        "adapters": (
            "peft/adapter_config.json",
            {"peft_type": "LORA", "auto_mapping": None, "target_modules": ["a"]},
            lambda: weights.read(f"{folder}/peft"),
        ),
        "tfds": ("own/1.0.0/features.json", features, own),
        "tfds before 4.4": ("own/1.0.0/features.json", legacy, own),
    }


KINDS = (
    *("checkpoint", "account", "result", "search", "data set", "tokenizer", "index", "adapters"),
    *("tfds", "tfds before 4.4"),
)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_no_file_of_another_kind_runs_code(tmp_path, ran, name):
    place, value, read = readers(tmp_path)[name]
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    with contextlib.suppress(UserError):
        read()  # which loads what the reader needs
    for mutant in some(value, ran, 400):
        path.write_text(json.dumps(mutant))
        with audit.audited() as found, only_user_errors():
            read()
        assert not found and not ran.exists(), mutant


@pytest.mark.parametrize("packed", [dict, json.dumps], ids=["plain", "a text"])
def test_no_features_within_a_text_run_code(tmp_path, ran, packed):
    """TFDS reads the content of a feature as JSON, too, where it is a text."""
    path, value, read = readers(tmp_path)["tfds before 4.4"]
    (tmp_path / path).write_text(json.dumps(value))
    read()
    for hostile in hostile_configs.PATHS:
        content = {"features": {"x": {"pythonClassName": hostile, "tensor": {}}}}
        (tmp_path / path).write_text(json.dumps({**value, "content": packed(content)}))
        with audit.audited() as found, pytest.raises(UserError):
            read()
        assert not found and not ran.exists(), hostile


@pytest.mark.slow
def test_no_keras_file_runs_code(tmp_path, ran):
    inputs = keras.Input((2,))
    rescaled = keras.layers.Rescaling(1.0)(inputs)
    keras.Model(inputs, keras.layers.Dense(1, "relu")(rescaled)).save(tmp_path / "whole.keras")
    whole = zipfile.ZipFile(tmp_path / "whole.keras")
    value = json.loads(whole.read("config.json"))
    models.load_model(str(tmp_path / "whole.keras"))
    for mutant in some(value, ran, 60):
        with zipfile.ZipFile(tmp_path / "m.keras", "w") as file:
            for name in whole.namelist():
                content = json.dumps(mutant) if name == "config.json" else whole.read(name)
                file.writestr(name, content)
        with audit.audited() as found, contextlib.suppress(Exception):
            models.load_model(str(tmp_path / "m.keras"))
        # Keras may import its own modules, those of keras_hub, and nothing else.
        foreign = [line for line in found if str(ran.parent) in line or "os." in line]
        assert not foreign and not ran.exists(), mutant


@pytest.mark.parametrize("place", ["secret", "../secret", "{}/secret"])
def test_an_onnx_file_reads_no_file_beside_it_and_runs_no_other_operation(
    tmp_path, monkeypatch, place
):
    (tmp_path / "secret").write_bytes(bytes(16))
    monkeypatch.chdir(tmp_path)
    weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    for key, text in ("location", place.format(tmp_path)), ("length", "16"):
        weight.external_data.add(key=key, value=text)
    values = [onnx.helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy"]
    for weights_, operation in ([weight], ("Add", ["x", "w"], "")), ([], ("Run", ["x"], "canary")):
        node = onnx.helper.make_node(*operation[:2], ["y"], domain=operation[2])
        graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], weights_)
        opsets = [onnx.helper.make_opsetid(domain, 17) for domain in ("", "canary")]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        with audit.audited() as found, pytest.raises(UserError, match="ONNX Runtime cannot load"):
            served.load("m.onnx")
        assert not [line for line in found if "canary" in line]
