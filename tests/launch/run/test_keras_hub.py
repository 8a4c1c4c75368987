"""Runs of KerasHub's models from a config: every command on them, and a run that is killed."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import warm
from tests.support.hub.tiny_gemma3 import WORDS, build_tiny_gemma3, write_texts
from tftpu.checkpoint import manifest
from tftpu.launch.main import main
from tftpu.launch.run import finished, serving
from tftpu.launch.run.finished import FinishedRunOptions

pytestmark = pytest.mark.slow
STEPS = 300
ON_JAX = {"env": {**os.environ, "KERAS_BACKEND": "jax"}, "capture_output": True, "text": True}
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
    adapted = capsys.readouterr().out
    assert main(["evaluate", str(run), "--base", "--tpu=none"]) == 0
    losses = [float(said.split()[-3]) for said in (adapted, capsys.readouterr().out)]
    assert "sparse_categorical_accuracy" in adapted and losses[0] < 0.75 * losses[1]
    for name in ("exported", "exported.keras"):  # each is compared with the model
        assert main(["export", str(run), f"--output={tmp_path / name}"]) == 0
    said = capsys.readouterr().out
    assert "import keras.models, keras_hub; " in said and ", compile=False)" in said
    assert main(["export-weights", str(run), "--adapters", f"--output={tmp_path / 'peft'}"]) == 0
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["r"] == 8  # two heads
    limits = serving.LanguageOptions(None, None, None)
    served = serving.restore_served_run(str(run), FinishedRunOptions(config=None), limits)
    assert isinstance(served.model, Language) and served.step == STEPS
    found = served.model.encode("the quick")
    assert found[0] == 2  # the token that begins a text
    assert served.model.decoder([])(found) == "the quick"


@pytest.mark.parametrize("kind", ["adapters", "all weights, sharded"])
def test_a_preset_is_read_by_plain_kerashub(kind, config, run, tmp_path, capsys):
    import keras_hub

    workdir, to = str(run), str(tmp_path / "preset")
    if kind != "adapters":
        workdir = str(tmp_path / "run")
        words = ["train", str(config), f"--workdir={workdir}", "--config.model.lora=0"]
        words += ["--config.cluster.engine=jax", "--config.cluster.tpu=none"]
        words += ["--config.cluster.virtual_devices=2", "--config.cluster.mesh=fsdp:2"]
        words = [sys.executable, "-m", "tftpu.launch.main", *words, "--config.train.steps=20"]
        warm.run(words, check=True, **ON_JAX)
    assert main(["export", workdir, "--format=preset", f"--output={to}"]) == 0
    said = capsys.readouterr().out
    assert f"read by  keras_hub.models.Gemma3CausalLM.from_preset({to!r})" in said
    assert "tftpu serve" not in said  # which takes the run
    read = keras_hub.models.CausalLM.from_preset(to)
    texts = ["the quick brown fox", "all of its old books"]
    batch = read.preprocessor.generate_preprocess(texts)
    assert batch["token_ids"].shape == (2, 16)  # the run's length, not the preset's
    experiment = finished.load_experiment(workdir)
    experiment.cluster.engine = "tensorflow"
    trained = finished.restore_without_data(experiment, workdir).trainer
    wanted = np.asarray(trained.model(batch, training=False))
    np.testing.assert_allclose(np.asarray(read(batch, training=False)), wanted, atol=1e-5)
    first = keras_hub.models.CausalLM.from_preset(str(config.parent / "gemma3"))
    assert np.abs(np.asarray(first(batch, training=False)) - wanted).max() > 0.1
    read.compile(sampler="greedy")
    length = len(read.preprocessor.tokenizer("the quick brown fox")) + 1  # that begins a text
    written = read.generate("the quick brown fox", max_length=min(16, length + 12))
    assert len(written) > len("the quick brown fox")
    if kind == "adapters":  # the other's engine needs a process of its own
        assert read_text(capsys, workdir, "--prompt=the quick brown fox").startswith(written)


def test_adapters_above_a_rounded_base_learn_as_above_floats(config, run, tmp_path):
    workdir, flag = tmp_path / "run", "--config.model.lora_base=int4"
    assert main(["train", str(config), f"--workdir={workdir}", "--tpu=none", flag]) == 0
    assert read_losses(workdir)[STEPS] == pytest.approx(read_losses(run)[STEPS], rel=0.05)
    found = load_file(workdir / "checkpoints" / str(STEPS) / "model.safetensors")
    assert found and all("lora_kernel" in name for name in found)
    assert main(["export", str(workdir), f"--output={tmp_path / 'merged.keras'}"]) == 0
    words = ["export-weights", str(workdir), "--adapters", f"--output={tmp_path / 'peft'}"]
    assert main(words) == 0


def test_a_run_does_not_resume_on_other_texts(config, run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    words = ["train", str(config), f"--workdir={tmp_path / 'run'}", "--tpu=none"]
    texts = config.parent / "texts.txt"
    first = texts.read_text()
    texts.write_text(first.swapcase())
    try:
        assert main([*words, "--config.train.steps=310"]) == 2
    finally:
        texts.write_text(first)
    assert "their number is the same, but not the examples" in capsys.readouterr().err


def test_mistakes_are_explained(config, tmp_path, capsys):
    words = ["train", str(config), f"--workdir={tmp_path / 'run'}", "--tpu=none"]
    for flag, said in {
        "--config.model.preset=gemma3_1bb": "Did you mean 'gemma3_1b'?",
        "--config.model.task=causal_ml": "KerasHub has no such task. Did you mean 'causal_lm'?",
        "--config.data.train_text=nothing.txt": "There is no file 'nothing.txt'",
        "--config.model.weights=some": "model.weights is 'some'",
        "--config.model.init_from=runs/x": "name the folder of a preset",
    }.items():
        assert main([*words, flag]) == 2
        assert said in capsys.readouterr().err


def build_bert(folder: Path) -> str:
    """Saves a small text classifier; returns the fields of a config for it."""
    import keras_hub

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=names)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = keras_hub.models.BertBackbone(len(names), 1, 2, 16, 32, max_sequence_length=8)
    task = keras_hub.models.BertTextClassifier(backbone, 5, preprocessor=preprocessor)
    task.save_to_preset(str(folder / "bert"))
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(rng.choice(WORDS[k * 8 :][:8], 4))},{'ab'[k]}" for k in (0, 1) * 60]
    (folder / "t.csv").write_text("review,kind\n" + "\n".join(rows))
    (folder / "new.txt").write_text("the quick brown fox\nall its books again\n")
    data = f"Texts(train_text='{folder}/t.csv', field='review', label='kind', global_batch_size=16)"
    return f"tftpu.KerasHub('{folder}/bert', 'text_classifier', num_classes=2), data={data}"


def build_vit(folder: Path) -> str:
    """Saves a small image classifier; returns the fields of a config for it."""
    import keras_hub
    from PIL import Image

    converter = keras_hub.layers.ViTImageConverter(image_size=(16, 16), scale=1 / 127.5, offset=-1)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    backbone = keras_hub.models.ViTBackbone((16, 16, 3), (8, 8), 1, 2, 16, 32)
    task = keras_hub.models.ViTImageClassifier(backbone, 5, preprocessor=preprocessor)
    task.save_to_preset(str(folder / "vit"))
    rng = np.random.default_rng(0)
    for split, kind in [(s, k) for s in ("train", "validation") for k in "ab"]:
        place = folder / "images" / split / kind
        place.mkdir(parents=True)
        for number in range(16):
            pixels = rng.integers(0, 90, (20, 20, 3)).astype("uint8")
            pixels[..., "ab".index(kind)] += 120
            Image.fromarray(pixels).save(place / f"{number}.png")
    data = (
        f"StreamedImages(format='folder', data_dir='{folder}/images', image_size=20, "
        "num_classes=2, image_dtype='uint8', global_batch_size=16)"
    )
    return f"tftpu.KerasHub('{folder}/vit', 'image_classifier', num_classes=2), data={data}"


@pytest.mark.parametrize(
    ("build", "address"),
    [(build_bert, "text:{}/new.txt"), (build_vit, "images:{}/images/validation/b")],
)
def test_classifiers_learn_and_predict(build, address, tmp_path, capsys):
    fields = build(tmp_path)
    config = tmp_path / "classes.py"
    config.write_text(
        "import tftpu\nfrom tftpu.input_pipelines.sources import StreamedImages, Texts\n"
        f"def get_config():\n    return tftpu.Experiment({fields},\n"
        "        train=tftpu.TrainConfig(steps=40), optimizer=tftpu.OptimizerConfig(\n"
        "            name='adam', learning_rate=0.01, warmup_steps=0))"
    )
    run, output = str(tmp_path / "run"), tmp_path / "predicted"
    assert main(["train", str(config), f"--workdir={run}", "--tpu=none"]) == 0
    assert main(["evaluate", run, "--tpu=none", "--gate=sparse_categorical_accuracy>=0.9"]) == 0
    given = address.format(tmp_path)
    assert main(["predict", run, f"--input={given}", f"--output={output}", "--tpu=none"]) == 0
    (file,) = output.glob("*.jsonl")
    assert json.loads(file.read_text().splitlines()[-1])["class_name"] == "b"
    assert main(["export", run, f"--output={tmp_path / 'exported'}"]) == 0
    if build is build_bert:
        for_texts = serving.LanguageOptions(None, None, None)
        model: Any = serving.restore_served_run(run, FinishedRunOptions(), for_texts).model
        assert model.call(model.encode(["all its books again"]))["label"] == [b"b"]
    if build is build_vit:  # the preprocessor is inside
        assert "images uint8 [20, 20, 3]" in capsys.readouterr().out
    assert main(["export", run, "--format=preset", f"--output={tmp_path / 'preset'}"]) == 0


def test_its_data_are_checked_and_shown(config, capsys):
    assert main(["data", "check", str(config)]) == 0
    said = capsys.readouterr().out
    assert "the whole data set and 4 batches take" in said
    assert "is held out to evaluate on" in said
    assert "16 tokens; the task's own loss is a mean over them, padding included" in said
    assert "none of 48 texts of the first batches is cut at 16 tokens; 30% of the positions" in said
    assert main(["data", "check", str(config), "--config.model.sequence_length=6"]) == 0
    said = capsys.readouterr().out
    assert said.count("Texts are cut at model.sequence_length") == 1
    assert "48 of 48 texts of the first batches are cut at 6 tokens." in said
    longest = re.search(r"needs (\d+) tokens: set --config.model.sequence_length=\1 or", said)
    assert longest and 6 < int(longest[1]) <= 16
    assert main(["data", "check", str(config), "--config.model.sequence_length=" + longest[1]]) == 0
    assert "is cut at" in capsys.readouterr().out
    assert main(["data", "show", str(config)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "0/padding_mask: bool (3, 16), from 0 to 1"
    assert (
        shown[-2].startswith("text 2, ")
        and "of 16 tokens, with its start and end tokens" in shown[-2]
    )
    text = shown[-1].removeprefix("    | <bos>")  # SentencePiece writes nothing for these
    assert text.endswith("<eos>") and text.split()[0] in WORDS


def test_the_price_of_its_texts_is_not_known(config, capsys):
    assert main(["preflight", str(config), "--slices=v5e-1", "--generate=2"]) == 2
    assert "but not from KerasHub's" in capsys.readouterr().err


def test_a_preset_that_is_not_there_is_named_with_what_lies_beside_it(config, capsys):
    folder = config.parent / "gemma4"
    words = [str(config), f"--config.model.preset={folder}", f"--workdir={config.parent}/none"]
    assert main(["train", *words]) == 2
    assert f"Did you mean '{config.parent}/gemma3'?" in capsys.readouterr().err
    assert main(["train", *words[:1], "--config.model.preset=nothing", *words[2:]]) == 2
    assert capsys.readouterr().err.strip().endswith("--config.model.preset=PATH.")


def test_its_sharding_is_shown(config):
    """Its task compiles itself, and an optimizer's counter has a value, not an initializer."""
    command = [sys.executable, "-m", "tftpu.launch.main", "config", "show", str(config)]
    command += ["--sharding", "--config.cluster.mesh=fsdp:8"]
    shown = warm.run(command, check=True, **ON_JAX).stdout
    *rows, total = shown.splitlines()
    [kernel] = [row for row in rows if "decoder_block_0/attention/query/kernel " in row]
    assert kernel.endswith("not trained") and "lora_kernel_a" in shown
    shapes = [row.split()[1].split("x") for row in rows]
    whole = sum(4 * math.prod(map(int, shape)) for shape in shapes) / 2**20
    assert total.startswith("A device of 8 holds") and f" of {whole:,.1f} MiB of weights" in total


@pytest.mark.compiles
def test_a_check_before_renting_reads_no_weights(config):
    """A trace for a mesh has no values to read weights into."""
    command = [sys.executable, "-m", "tftpu.launch.main", "preflight", str(config)]
    mesh = "--config.cluster.mesh=fsdp:8"
    done = warm.run([*command, "--slices=v5e-8", mesh], check=True, **ON_JAX)
    assert "with the mesh fsdp:8" in done.stdout + done.stderr
