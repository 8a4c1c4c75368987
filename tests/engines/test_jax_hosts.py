"""Several processes of the JAX engine train like one, on loopback in place of a pod's hosts."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import host_processes, jax_hosts
from tests.support.host_processes import codes, said
from tests.support.strategies import relative
from tftpu.checkpoint.store import Checkpoints
from tftpu.models.weights import files

GROUPS = ("model", "optimizer", "ema")
STEPS = 60
LOST = 8  # seconds after which a host is lost
COMMAND = (
    *("tftpu.launch.main", "train", "--config=digits_resnet", "--config.cluster.engine=jax"),
    *("--config.model.width=8", f"--config.train.steps={STEPS}", "--config.train.eval_every=30"),
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the folders of the same runs on two hosts and on one, by the number of hosts."""
    folders = {count: tmp_path_factory.mktemp(f"hosts-{count}") for count in (2, 1)}
    for count, folder in folders.items():
        words = ("tests.support.jax_hosts", str(folder), str(count))
        started = host_processes.start(folder, count, *words)
        assert codes(started) == [0] * count, "\n\n".join(said(folder))
    return folders


def test_two_hosts_have_the_losses_evaluations_and_predictions_of_one(runs):
    two, one = (dict(np.load(runs[count] / "results.npz")) for count in (2, 1))
    assert two.keys() == one.keys()
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=2e-6, atol=2e-6, err_msg=name)


def test_two_hosts_have_the_weights_of_one(runs):
    for mesh in jax_hosts.MESHES:
        two, one = (
            parts_of(runs[count] / mesh / "checkpoints" / str(jax_hosts.STEPS)) for count in (2, 1)
        )
        assert two.keys() == one.keys()
        for name, expected in one.items():
            assert relative(two[name], expected) < 1e-6, (mesh, name)


def test_each_host_writes_the_parts_that_it_holds(runs):
    folder = runs[2] / "fsdp:4" / "checkpoints" / str(jax_hosts.STEPS)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
    for group in GROUPS:
        sizes = [
            sum(size for size, _ in blocks)
            for name, blocks in listed.items()
            if name.startswith((f"{group}.", f"{group}-"))
        ]
        assert len(sizes) == 2
        assert max(sizes) < 1.2 * min(sizes)


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
    while (Checkpoints(str(workdir)).steps() or [0])[-1] < step:
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


@pytest.mark.slow
def test_two_hosts_stop_together_fail_together_and_finish_like_one(tmp_path, alone):
    workdir = tmp_path / "run"

    # A host that is not the chief is asked to stop: both save and stop after the same step.
    processes = start(workdir, 2)
    wait_for(workdir, 10, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert codes(processes) == [75, 75], said(tmp_path)
    step = Checkpoints(str(workdir)).steps()[-1]
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
        step = Checkpoints(str(workdir)).steps()[-1]

    assert codes(start(workdir, 2)) == [0, 0], said(tmp_path)
    assert "Resuming from the checkpoint" in said(tmp_path)[0]
    assert "Done" not in said(tmp_path)[1]
    assert losses(workdir) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_four_hosts_whose_chief_is_killed_resume_as_two_as_one_and_on_tensorflow(tmp_path, alone):
    workdir = tmp_path / "run"
    processes = start(workdir, 4)
    wait_for(workdir, 20, processes)
    processes[0].kill()
    assert codes(processes) == [-signal.SIGKILL, 69, 69, 69], said(tmp_path)
    for count, steps in ((2, 40), (1, 50)):
        flags = [f"--config.train.steps={steps}", "--config.optimizer.total_steps=60"][:1]
        assert codes(start(workdir, count, *flags)) == [0] * count, said(tmp_path)
    assert Checkpoints(str(workdir)).steps()[-1] == 50


def test_a_host_that_does_not_arrive_is_reported(tmp_path):
    pass
