"""`--config.model.lora`: runs that train adapters above the weights of another run."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import warm
from tests.support.models.strategies import relative
from tftpu.launch.main import main

pytestmark = pytest.mark.slow
CONFIG = """
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Images
from tftpu.models.sizes import ViT


def get_config():
    return Experiment(
        model=ViT("tiny", patch=4, layers=2, width=64, heads=2, image_size=8, channels=1,
                  num_classes=10),
        data=Images(name="digits", global_batch_size=64, image_size=8, channels=1),
        optimizer=OptimizerConfig(
            name="adam", learning_rate=0.003, warmup_steps=0, decay="constant"
        ),
        train=TrainConfig(
            steps=20, steps_per_loop=5, log_every=5, eval_every=0, checkpoint_every=0
        ),
    )
"""
EXACT = 2e-5
EVERY = "--config.train.checkpoint_every=5"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny_vit.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture(scope="module")
def base(config, tmp_path_factory) -> str:
    """Returns the checkpoint that adapters are trained above."""
    workdir = tmp_path_factory.mktemp("base")
    main(["train", f"--config={config}", f"--workdir={workdir}", "--tpu=none"])
    return str(workdir / "checkpoints" / "20")


@pytest.fixture(scope="module")
def adapted(config, base, tmp_path_factory) -> Path:
    """Returns the workdir of a run on one device that trained adapters."""
    return train(config, tmp_path_factory.mktemp("adapted"), base, EVERY)


def copy_stopped(run: Path, workdir: Path) -> Path:
    """Returns a copy of a run, as if it had been stopped after step 5."""
    shutil.copytree(run, workdir)
    for step in (10, 15, 20):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    return workdir


def train(config: str, workdir: Path, base: str, *flags: str) -> Path:
    given = [f"--config={config}", f"--workdir={workdir}", f"--config.model.init_from={base}"]
    engine = [] if any("engine" in flag or "virtual" in flag for flag in flags) else ["--tpu=none"]
    words = ["train", *given, "--config.model.lora=4", *engine, *flags]
    if engine:
        assert main(words) == 0
    else:  # devices are counted once in a process
        is_jax = any("engine=jax" in flag or "mesh" in flag for flag in flags)
        environment = {**os.environ, "KERAS_BACKEND": "jax" if is_jax else "tensorflow"}
        command = [sys.executable, "-m", "tftpu.launch.main", *words]
        warm.run(command, check=True, env=environment, capture_output=True)
    return workdir


def refused(capsys, *words: str) -> str:
    """Returns what a command says that fails."""
    capsys.readouterr()
    assert main(list(words)) != 0
    return capsys.readouterr().err


def saved(workdir: Path, step: int = 20) -> dict[str, np.ndarray]:
    arrays = load_file(workdir / "checkpoints" / str(step) / "model.safetensors")
    return {name.split(" ", 1)[1]: array for name, array in arrays.items()}


def losses(workdir: Path) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def assert_same(one: Path, other: Path, bound: float = EXACT) -> None:
    assert np.allclose(losses(one), losses(other), rtol=bound)
    ours, theirs = saved(one), saved(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert relative(value, theirs[path]) < 20 * bound, path


def test_checkpoints_hold_the_adapters_the_classifier_and_the_digest_of_the_base(adapted, base):
    arrays = saved(adapted)
    assert {path for path in arrays if "lora" not in path} == {"head/kernel", "head/bias"}
    assert len(arrays) == 2 * 4 * 2 + 2
    assert losses(adapted)[-1] < 0.9 * losses(adapted)[0]
    folder = adapted / "checkpoints" / "20"
    assert len(json.loads((folder / "state.json").read_text())["base"]) == 16
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 0.4 * sum(file.stat().st_size for file in Path(base).iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--config.cluster.virtual_devices=4"],
        ["--config.cluster.engine=jax"],
        ["--config.cluster.virtual_devices=8", "--config.cluster.mesh=data:2,fsdp:4"],
        ["--config.cluster.virtual_devices=4", "--config.cluster.mesh=data:2,tensor:2"],
    ],
    ids=["tensorflow_4", "jax_1", "jax_fsdp", "jax_tensor"],
)
def test_adapters_are_the_same_on_one_device_and_on_many(config, base, adapted, tmp_path, flags):
    # JAX draws other adapters: both engines begin with those that TensorFlow wrote.
    run = copy_stopped(adapted, tmp_path / "run")
    assert_same(train(config, run, base, EVERY, *flags), adapted)


MESH = ["--config.cluster.virtual_devices=4", "--config.cluster.mesh=fsdp:4"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "bits, flags",
    [
        ("int8", MESH),
        ("int4", MESH),
        ("int8", ["--config.cluster.virtual_devices=2"]),
    ],
    ids=["int8_mesh", "int4_mesh", "int8_tensorflow_2"],
)
def test_a_rounded_base_trains_the_same_on_many_devices(config, base, tmp_path, bits, flags):
    # The convolution of the patches is among them.
    rounded = [
        f"--config.model.lora_base={bits}",
        "--config.model.lora_targets=*_attention/*,patch*",
    ]
    one = train(config, tmp_path / "one", base, EVERY, *rounded)
    assert len([path for path in saved(one) if "patch" in path]) == 2
    many = copy_stopped(one, tmp_path / "many")
    assert_same(one, train(config, many, base, EVERY, *rounded, *flags), 1e-4)


def test_a_run_that_was_stopped_resumes_above_the_same_base_alone(
    config, base, adapted, tmp_path, capsys
):
    place, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, place)
    train(config, run, str(place), "--config.train.steps=10")
    shutil.move(place, tmp_path / "kept")
    other = place / "model.safetensors"
    main(["export-weights", f"--workdir={adapted}", f"--to={other}", "--merge"])
    given = [f"--config={config}", f"--workdir={run}", "--tpu=none", "--config.model.lora=4"]
    said = refused(capsys, "train", *given, f"--config.model.init_from={place}")
    assert "were trained with weights whose digest is" in said
    shutil.rmtree(place)
    shutil.move(tmp_path / "kept", place)
    train(config, run, str(place))
    assert_same(run, adapted, 1e-7)


@pytest.mark.exhaustive
def test_a_base_that_was_moved_is_named_anew(adapted, base, tmp_path, monkeypatch, capsys):
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(adapted, run)
    recorded = json.loads((run / "config.json").read_text())
    recorded["model"]["init_from"] = str(tmp_path / "nowhere")
    (run / "config.json").write_text(json.dumps(recorded))
    shutil.copytree(base, moved)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", f"--workdir={run}"]) == 2
    assert main(["evaluate", f"--workdir={run}", "--config.model.init_from=moved"]) == 0
    found = capsys.readouterr().out.splitlines()[-1]
    assert main(["evaluate", f"--workdir={adapted}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == found
    assert main(["evaluate", f"--workdir={run}", "--config.model.lora=2"]) == 2
    assert "cannot change it" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_embeddings_are_those_above_the_base(adapted, tmp_path):
    words = ["--input=evaluation", "--outputs=logits,embedding", f"--output={tmp_path / 'p'}"]
    assert main(["predict", f"--workdir={adapted}", *words]) == 0
    rows = [json.loads(t) for t in next((tmp_path / "p").glob("*.jsonl")).read_text().splitlines()]
    assert main(["export", f"--workdir={adapted}", f"--to={tmp_path / 'saved'}"]) == 0
    weights = tmp_path / "merged.safetensors"
    assert main(["export-weights", f"--workdir={adapted}", f"--to={weights}", "--merge"]) == 0
    found = load_file(weights)
    kernel = next(v for k, v in found.items() if v.shape in ((10, 64), (64, 10)))
    bias = next(v for k, v in found.items() if v.shape == (10,))
    kernel = kernel if kernel.shape[1] == 10 else kernel.T
    logits = np.array([row["embedding"] for row in rows]) @ kernel + bias
    assert relative(logits, np.array([row["logits"] for row in rows])) < 1e-5


def test_merged_weights_are_the_adapted_model(config, adapted, base, tmp_path, capsys):
    path = str(tmp_path / "merged.safetensors")
    main(["export-weights", f"--workdir={adapted}", f"--to={path}", "--merge"])
    said = capsys.readouterr()
    assert "adapters merged" in said.out and f"Loading {adapted} ..." in said.err
    main(["evaluate", f"--workdir={adapted}"])
    evaluated = capsys.readouterr().out
    assert not [name for name in load_file(path) if "lora" in name]
    # A run of no training: its evaluation is of the weights that were loaded.
    still = ["--config.optimizer.learning_rate=1e-30", "--config.train.steps=1"]
    given = [f"--config={config}", f"--workdir={tmp_path}/run", f"--config.model.init_from={path}"]
    main(["train", *given, "--tpu=none", *still])
    capsys.readouterr()
    main(["evaluate", f"--workdir={tmp_path}/run"])
    assert numbers(capsys.readouterr().out) == pytest.approx(numbers(evaluated), rel=1e-4)


def numbers(text: str) -> dict[str, float]:
    """Returns the metrics of a line of `tftpu evaluate`."""
    words = text.strip().splitlines()[-1].split()
    return {name: float(value) for name, value in zip(words[2::2], words[3::2])}


def test_a_checkpoint_of_adapters_is_no_base(config, adapted, tmp_path, capsys):
    given = [f"--config={config}", f"--workdir={tmp_path}", "--tpu=none", "--config.model.lora=4"]
    checkpoint = adapted / "checkpoints" / "20"
    said = refused(capsys, "train", *given, f"--config.model.init_from={checkpoint}")
    assert "holds only adapters" in said


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--merge", "--adapters"], "give --merge to write all weights"),
        ([], "trained adapters: give --merge"),
        (["--adapters"], "must be a folder, because --adapters writes two files"),
    ],
)
def test_a_run_with_adapters_asks_what_to_write(adapted, tmp_path, capsys, flags, said):
    to = f"--to={tmp_path}/w.safetensors"
    assert said in refused(capsys, "export-weights", f"--workdir={adapted}", to, *flags)


def test_adapters_need_weights_to_adapt(config, tmp_path, capsys):
    given = ["train", f"--config={config}", f"--workdir={tmp_path}", "--tpu=none"]
    said = refused(capsys, *given, "--config.model.lora=4")
    assert "model.lora=4 adapts trained weights: name them" in said
    said = refused(capsys, *given, "--config.model.lora_base=int8")
    assert "model.lora_base works only with low-rank adapters" in said


def test_adapters_are_not_written_over_a_file(adapted, tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    words = [f"--to={tmp_path / 'taken'}", "--adapters"]
    assert main(["export-weights", f"--workdir={adapted}", *words]) == 2
    assert "taken exists already: choose another place" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_file_for_peft_holds_the_adapters_by_transformers_names(adapted, tmp_path, capsys):
    main(["export-weights", f"--workdir={adapted}", f"--to={tmp_path}/peft", "--adapters"])
    said = capsys.readouterr()
    assert "Writing the adapters ..." in said.err
    assert f"read by  peft.PeftModel.from_pretrained(model, '{tmp_path}/peft')" in said.out
    arrays = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    query = arrays["base_model.model.vit.layers.0.attention.q_proj.lora_B.weight"]
    ours = saved(adapted)["block1_attention/qkv/lora_kernel_b"]
    assert np.array_equal(query, ours[:, :64].T)
