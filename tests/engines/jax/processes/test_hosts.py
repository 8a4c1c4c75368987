"""Several processes of the JAX engine train like one, on loopback in place of a pod's hosts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import warm
from tests.support.fakes import host_processes
from tests.support.fakes.host_processes import codes, said
from tests.support.models.strategies import relative
from tests.support.programs import jax_hosts
from tftpu.checkpoint.store import Checkpoints
from tftpu.models.weights import files
from tftpu.storage import safetensors

MESHES = ("data:4", "fsdp:4")
GROUPS = ("model", "optimizer", "ema")
STEPS = 90
LOST = 8  # seconds after which a host is lost
COMMAND = (
    *("tftpu.launch.main", "train", "--config=digits_resnet", "--config.cluster.engine=jax"),
    *("--config.model.width=8", "--config.model.blocks=(1,)", f"--config.train.steps={STEPS}"),
    "--config.train.eval_every=30",
    *("--config.train.steps_per_loop=5", "--config.train.checkpoint_every=10"),
    *("--config.train.log_every=5", f"--config.cluster.host_timeout={LOST}"),
)


def parts_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns all variables of a checkpoint, joined from the files of all processes."""
    found = {}
    for group in GROUPS:
        names = json.loads((checkpoint / "manifest.json").read_text())["files"]
        folder = checkpoint.parent / f"{group} of {checkpoint.name}"
        folder.mkdir(exist_ok=True)
        listed = {}
        for name in names:
            if name.startswith((f"{group}.", f"{group}-")):
                renamed = name.replace(group, "model", 1)
                shutil.copy(checkpoint / name, folder / renamed)
                listed[renamed] = []
        (folder / "manifest.json").write_text(json.dumps({"files": listed}))
        stored = files.read(str(folder))
        found |= {f"{group} {name}": array.content() for name, array in stored.items()}
        shutil.rmtree(folder)
    return found


def run(root: Path, *meshes: str, counts: tuple[int, ...] = (2, 1)) -> dict[int, Path]:
    """Returns the folders of the same runs on several hosts and on one, by the number of hosts."""
    folders, started = {count: root / str(count) for count in counts}, {}
    for count, folder in folders.items():
        words = ("tests.support.programs.jax_hosts", str(folder), str(count), *meshes)
        started[count] = host_processes.start(folder, count, *words)
    for count, processes in started.items():
        assert codes(processes) == [0] * count, "\n\n".join(said(folders[count]))
    return folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hosts"), *MESHES)


def assert_equal(several: Path, one: Path, meshes: tuple[str, ...]) -> None:
    """Asserts that runs have the same losses, evaluations, predictions and variables."""
    found, expected = (dict(np.load(folder / "results.npz")) for folder in (several, one))
    for mesh in meshes:
        for folder, values in ((several, found), (one, expected)):
            saved = folder / mesh / "checkpoints" / str(jax_hosts.STEPS)
            values |= {f"{mesh} {name}": value for name, value in parts_of(saved).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) < 5e-7, name


@pytest.mark.slow
def test_two_hosts_train_like_one(runs):
    assert_equal(runs[2], runs[1], MESHES)


@pytest.mark.exhaustive
def test_hosts_that_share_a_model_train_like_one(tmp_path):
    """Along `tensor`, two or four hosts feed the same examples."""
    meshes = ("fsdp:2,tensor:2", "tensor:4")
    folders = run(tmp_path, *meshes, counts=(4, 2, 1))
    for count in (2, 4):
        assert_equal(folders[count], folders[1], meshes)


@pytest.mark.slow
def test_each_host_writes_the_parts_that_it_holds(runs):
    folder = runs[2] / "fsdp:4" / "checkpoints" / str(jax_hosts.STEPS)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
    cut = 6 * 1024 + 1024 * 4  # elements of the kernels; what is smaller is whole, and the chief's
    [part] = [name for name in listed if name.startswith("model-1-")]
    arrays = safetensors.decode((folder / part).read_bytes())
    assert sum(array.size for array in arrays.values()) == cut / 2
    whole = safetensors.decode((folder / "model.safetensors").read_bytes())
    assert sum(array.size for array in whole.values()) == cut / 2 + 4 * 1024 + 4


@pytest.mark.slow
def test_only_the_chief_reports(runs):
    lines = (runs[2] / "fsdp:4" / "metrics.jsonl").read_text().splitlines()
    steps = [(line["step"], line["split"]) for line in map(json.loads, lines)]
    assert len(set(steps)) == len(steps)
    assert "train step" not in said(runs[2])[1]


def start(workdir: Path, count: int, *flags: str) -> list[subprocess.Popen]:
    """Starts `tftpu train` on several hosts that have four devices in all."""
    words = (*COMMAND, "--config.cluster.mesh=fsdp:4", f"--virtual_devices={4 // count}")
    return host_processes.start(workdir.parent, count, *words, f"--workdir={workdir}", *flags)


def wait_for(workdir: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Waits until there is a checkpoint of the step or a later one."""
    while (Checkpoints(str(workdir)).list_steps() or [0])[-1] < step:
        if any(process.poll() is not None for process in processes):
            pytest.fail("\n\n".join(said(workdir.parent)))
        time.sleep(0.02)


def losses(workdir: Path) -> dict[tuple, float]:
    """Returns the losses that a run logged, by step and split."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line["split"]): line["loss"] for line in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Returns the workdir of an undisturbed run of one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    assert codes(start(workdir, 1)) == [0], said(workdir.parent)
    return workdir


@pytest.mark.exhaustive
def test_two_hosts_stop_together_fail_together_and_finish_like_one(tmp_path, alone):
    workdir = tmp_path / "run"

    # A host that is not the chief is asked to stop: both save and stop after the same step.
    processes = start(workdir, 2)
    wait_for(workdir, 10, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert codes(processes) == [75, 75], said(tmp_path)
    step = Checkpoints(str(workdir)).list_steps()[-1]
    assert step < STEPS
    assert f"Stopped by another host after step {step}, saved" in said(tmp_path)[0]
    assert f"Stopped by SIGTERM after step {step}, saved" in said(tmp_path)[1]

    # One host is killed, or stands still: the other ends as well, with the reason.
    for number, lost in ((signal.SIGKILL, 1), (signal.SIGSTOP, 0)):
        processes = start(workdir, 2)
        wait_for(workdir, min(step + 10, STEPS - 10), processes)
        processes[lost].send_signal(number)
        began = time.monotonic()
        assert processes[1 - lost].wait(timeout=120) == 69, said(tmp_path)
        assert time.monotonic() - began < 3 * LOST
        assert f"Host {lost} was lost" in said(tmp_path)[1 - lost]
        processes[lost].kill()
        processes[lost].wait()
        step = Checkpoints(str(workdir)).list_steps()[-1]

    assert codes(start(workdir, 2)) == [0, 0], said(tmp_path)
    assert "Resuming from the checkpoint" in said(tmp_path)[0]
    assert "Done" not in said(tmp_path)[1]
    assert losses(workdir) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_does_not_arrive_is_lost(index):
    program = (
        "import tftpu; from tftpu.runtime import hosts; hosts.ARRIVE = 3\n"
        "try: tftpu.connect('none', engine='jax')\n"
        "except tftpu.HostLost as lost: print(lost); raise SystemExit(69)"
    )
    [port] = host_processes.free_ports(1)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]},
        "task": {"type": "worker", "index": index},
    }
    done = warm.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "jax", "TF_CONFIG": json.dumps(config)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 69, done.stderr
    assert f"Host {index} of 2 waited 3 s for the others" in done.stdout


@pytest.mark.exhaustive
def test_four_hosts_whose_chief_is_killed_resume_as_two_as_one_and_on_tensorflow(tmp_path, alone):
    workdir = tmp_path / "run"
    processes = start(workdir, 4)
    wait_for(workdir, 20, processes)
    processes[0].kill()
    assert codes(processes) == [-signal.SIGKILL, 69, 69, 69], said(tmp_path)
    for count in (2, 1):
        step = Checkpoints(str(workdir)).list_steps()[-1]
        processes = start(workdir, count)
        wait_for(workdir, step + 5, processes)
        processes[-1].send_signal(signal.SIGTERM)
        assert codes(processes) == [75] * count, said(tmp_path)
    on_tensorflow = ("--config.cluster.engine=tensorflow", "--config.cluster.mesh=None")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    words = (*COMMAND, *on_tensorflow, f"--workdir={workdir}")
    warm.run([sys.executable, "-m", *words], env=environment, check=True)
    assert losses(workdir) == pytest.approx(losses(alone), rel=1e-3)
