"""Commands that know one engine only, and configs that need the other."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.messages import check_message
from tftpu.config import ClusterConfig
from tftpu.errors import UserError
from tftpu.launch import main
from tftpu.launch.preflight import mesh_choice


def said(*command: str) -> str:
    """Returns what a command says that is refused."""
    done = subprocess.run(
        [sys.executable, "-m", "tftpu.launch.main", *command], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    check_message(done.stderr, "tftpu: ")
    return done.stderr


@pytest.mark.parametrize("where", ["vertex", "tpu-vm", "gke"])
@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ([], "tpu"),
        (["--config.cluster.engine=jax"], "jax-tpu"),
        (["--config.cluster.mesh=fsdp:4"], "jax-tpu"),
    ],
)
def test_a_rented_machine_installs_the_engine_that_the_config_takes(where, flags, extra, capsys):
    launch = ["launch", where, "--config=digits_resnet", "--slice=v5e-4", "--dry_run"]
    assert main.main([*launch, *flags]) == 0
    assert re.search(r"extras=([\w-]+)", capsys.readouterr().out)[1] == extra


@pytest.mark.exhaustive
def test_bench_times_the_jax_engine_beside_a_bare_step_and_keras():
    command = [sys.executable, "-m", "tftpu.launch.main", "bench", "--config=digits_resnet"]
    few = ["--config.train.log_every=3", "--config.train.steps_per_loop=2"]
    few += ["--config.data.global_batch_size=32"]
    jax = [*few, "--config.cluster.engine=jax", "--config.model.norm_batch=16"]
    compiled_well = {**os.environ, "XLA_FLAGS": ""}  # hundreds of steps run
    done = subprocess.run(
        [*command, *jax, "--compare"], capture_output=True, text=True, env=compiled_well
    )
    assert done.returncode == 0, done.stderr
    assert "1 device, JAX engine" in done.stdout
    assert "turns of 4 steps" in done.stdout  # of whole loops, with a log line at least
    rows = re.findall(r"^  (\w[\w ,]*?) +([\d.]+) ms/step", done.stdout, re.M)
    assert [name for name, _ in rows] == ["trainer", "bare step", "pipeline", "keras fit"]
    assert all(float(milliseconds) > 0 for _, milliseconds in rows)
    two = ["--config.cluster.mesh=tensor:2", "--config.cluster.virtual_devices=2", "--compare"]
    done = subprocess.run([*command, *jax, *two], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--compare runs Keras's fit on one device" in done.stderr


_OWN = """
import dataclasses
import keras, tftpu
from tftpu.input_pipelines.sources import Synthetic

@dataclasses.dataclass
class Net(tftpu.ModelConfig):
    def build(self):
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

def get_config():
    data = Synthetic(spec=("x: float32[2]", "y: int32 num_classes=2"), global_batch_size=4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    return tftpu.Experiment(model=Net(), data=data, metrics=metrics, loss=loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("jax", "--virtual_devices=2"),
        ("jax", "--config.cluster.virtual_devices=2"),
        ("tensorflow", "--config.cluster.virtual_devices=2"),
    ],
)
def test_the_cpu_is_split_for_a_config_that_makes_metrics(tmp_path, engine, flag):
    """Their variables start JAX or TensorFlow before the engine connects to the devices."""
    (tmp_path / "own.py").write_text(_OWN)
    command = ["train", "own.py", "--workdir=run", "--config.train.steps=1", flag]
    done = subprocess.run(
        [sys.executable, "-m", "tftpu.launch.main", *command, f"--config.cluster.engine={engine}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    assert ("2 devices, JAX" if engine == "jax" else "2 replicas") in done.stdout


@pytest.mark.slow
def test_the_sharding_of_a_config():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tftpu.launch.main", "config", "show", "python_gpt"),
            *("--sharding", "--config.cluster.mesh=data:2,fsdp:2,tensor:2"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *rows, total = done.stdout.splitlines()
    table = {row.split()[0]: " ".join(row.split()[1:]) for row in rows}
    # 128 * 512 float32s are 0.25 MiB, a quarter of which is on each device.
    assert table["block1_expand/kernel"] == "128x512 fsdp x tensor 0.062 MiB"
    assert table["block1_contract/kernel"] == "512x128 tensor x fsdp 0.062 MiB"
    assert table["block1_norm1/gamma"] == "128 - 0.000 MiB"
    held, whole, state = map(float, re.findall(r"[\d.]+(?= of| MiB)", total))
    assert held < 0.3 * whole
    assert state == pytest.approx(2 * held, abs=0.2)  # the two moments of Adam


def test_without_a_tpu_auto_cuts_nothing_and_keeps_the_engine():
    assert mesh_choice.choose_mesh(ClusterConfig(mesh="auto", virtual_devices=4), []) == "data:-1"
    assert mesh_choice.choose_mesh(ClusterConfig(mesh="fsdp:4"), []) == "fsdp:4"
    assert mesh_choice.choose_mesh(ClusterConfig(), []) is None


@pytest.mark.slow
@pytest.mark.compiles
def test_on_a_tpu_auto_asks_preflight():
    words = ["--config=digits_resnet", "--config.cluster.mesh=auto"]
    assert mesh_choice.find_fitting("v5e-8", words) == "data:8"
    with pytest.raises(UserError, match="preflight for v5e-8 failed"):
        mesh_choice.find_fitting("v5e-8", [*words, "--config.model.width=0"])


def test_a_misspelled_mesh_is_named_before_anything_loads(tmp_path):
    found = said(
        *("train", "--config=digits_resnet", f"--workdir={tmp_path}/run"),
        "--config.cluster.mesh=fspd:2",
    )
    assert "an unknown axis 'fspd'" in found and "Did you mean 'fsdp'?" in found
    assert not (tmp_path / "run").exists()
