"""Several processes train like one, on loopback in place of the hosts of a pod."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.fakes.host_processes import free_ports
from tftpu.checkpoint.store import Checkpoints
from tftpu.errors import UserError
from tftpu.runtime import hosts

STEPS = 60
COMMAND = [
    *(sys.executable, "-m", "tftpu.launch.main", "train", "--config=digits_resnet"),
    *("--config.model.width=8", "--config.model.blocks=(1,)", f"--config.train.steps={STEPS}"),
    *("--config.train.steps_per_loop=5", "--config.train.checkpoint_every=10"),
    *(
        "--config.train.log_every=5",
        "--config.train.eval_every=30",
        "--config.train.ema_momentum=0.9",
    ),
]


def start(workdir: Path, count: int, *flags: str) -> list[subprocess.Popen]:
    """Starts a process for each of `count` hosts, with output files next to the workdir."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    processes = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        if count > 1:
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        with open(workdir.parent / f"output-{index}.txt", "w") as output:
            processes.append(
                warm.Popen(
                    [*COMMAND, *flags, f"--workdir={workdir}"],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
    return processes


def wait_for(workdir: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Waits until there is a checkpoint of the step or a later one."""
    while (Checkpoints(str(workdir)).list_steps() or [0])[-1] < step:
        if any(process.poll() is not None for process in processes):
            pytest.fail("\n\n".join(said(workdir)))
        time.sleep(0.02)


def ends(processes: list[subprocess.Popen]) -> list[int]:
    return [process.wait(timeout=300) for process in processes]


def said(workdir: Path) -> list[str]:
    return [path.read_text() for path in sorted(workdir.parent.glob("output-*.txt"))]


def variables(workdir: Path) -> dict[str, bytes]:
    """Returns all variables in the last checkpoint of a run."""
    folder = workdir / "checkpoints" / str(STEPS)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def losses(workdir: Path) -> dict[tuple, float]:
    """Returns the losses that a run logged, by step and split."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len({(line["step"], line["split"]) for line in lines}) == len(lines)
    return {(line["step"], line["split"]): line["loss"] for line in lines}


@pytest.mark.slow
def test_two_hosts_stop_together_fail_together_and_finish_like_one(tmp_path):
    workdir = tmp_path / "hosts/run"
    workdir.parent.mkdir()

    # A host that is not the chief is asked to stop: both save and stop after the same step.
    processes = start(workdir, 2)
    wait_for(workdir, 10, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert ends(processes) == [75, 75], said(workdir)
    step = Checkpoints(str(workdir)).list_steps()[-1]
    assert step < STEPS
    assert f"Stopped by another host after step {step}, saved" in said(workdir)[0]
    assert f"Stopped by SIGTERM after step {step}, saved" in said(workdir)[1]

    # One host is killed: the other ends as well, with the reason.
    processes = start(workdir, 2)
    wait_for(workdir, step + 10, processes)
    processes[1].kill()
    assert ends(processes) == [69, -signal.SIGKILL], said(workdir)
    assert "Another host of the run was lost" in said(workdir)[0]
    assert "Traceback" not in said(workdir)[0]

    assert ends(start(workdir, 2)) == [0, 0], said(workdir)
    assert "Resuming from the checkpoint" in said(workdir)[0]
    assert "Done" not in said(workdir)[1]  # only the chief reports
    # Two replicas in one process take the same sums in the same order.
    alone = tmp_path / "alone/run"
    alone.parent.mkdir()
    assert ends(start(alone, 1, "--virtual_devices=2")) == [0], said(alone)
    assert variables(workdir) == variables(alone)
    assert losses(workdir) == losses(alone)


@pytest.mark.slow
def test_four_hosts_whose_chief_is_killed_resume_as_two(tmp_path):
    """A different number of hosts resumes from the same checkpoint."""
    workdir = tmp_path / "hosts/run"
    workdir.parent.mkdir()
    processes = start(workdir, 4)
    wait_for(workdir, 20, processes)
    processes[0].kill()
    codes = ends(processes)
    assert codes[0] == -signal.SIGKILL
    assert all(codes), said(workdir)  # TensorFlow itself may end them, with a signal
    assert ends(start(workdir, 2)) == [0, 0], said(workdir)
    alone = tmp_path / "alone/run"
    alone.parent.mkdir()
    assert ends(start(alone, 1)) == [0], said(alone)
    # Sums in another order, as of four replicas in one process: rounding, which from some step on
    # turns a ReLU the other way and then grows with the training.
    found, expected = losses(workdir), losses(alone)
    assert found == pytest.approx(expected, rel=2e-2)
    early = [key for key in expected if key[0] <= 20]
    assert [found[key] for key in early] == pytest.approx(
        [expected[key] for key in early], rel=1e-5
    )


def config(**cluster) -> str:
    task = {"type": cluster.pop("type", "worker"), "index": cluster.pop("index", 0)}
    return json.dumps({"cluster": cluster, "task": task})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 1)),
        ("{}", (0, 1)),
        (config(worker=["a:1"]), (0, 1)),
        (config(worker=["a:1", "b:1"], index=1), (1, 2)),
        (config(chief=["a:1"], worker=["b:1", "c:1"], index=1), (2, 3)),
        (config(chief=["a:1"], worker=["b:1"], type="chief"), (0, 2)),
        (config(worker=["[::1]:80", "job-0.example.com:65535"]), (0, 2)),
    ],
)
def test_the_place_of_a_process_is_read_from_tf_config(text, expected, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert hosts.read_task() == hosts.Task(*expected)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "cannot be read"),
        (config(worker=["a:1", "b:1"], index=2), "the task worker 2"),
        (config(worker=["a:1", "b:1"], index=-1), "the task worker -1"),
        (config(worker=["a:1", "b:1"], type="chief"), "the task chief 0"),
        (config(chief=["c:1"], worker=["a:1"], type="chief", index=1), "the task chief 1"),
        (config(worker=["a:1", "b:1"], ps=["c:1"]), "TF_CONFIG has ps"),
        *(
            (config(worker=["a:1", address]), "has the address .* not HOST:PORT")
            for address in (
                "b",
                "b:",
                ":1",
                "b:x",
                "b:0",
                "b:65536",
                "b:²",
                "b c:1",
                "http://b:1",
                1,
            )
        ),
        (config(worker="ab"), "has the address 'a'"),
    ],
)
def test_an_invalid_tf_config_fails_with_a_clear_error(text, sentence, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match=sentence):
        hosts.read_task()


@pytest.mark.parametrize("waits", [True, False])
def test_a_process_says_what_it_waits_for_if_it_takes_long(waits, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "_LONG", 0.05 if waits else 60.0)
    with hosts.reported_if_long(hosts.Task(1, 2, "host:8471"), 300):
        time.sleep(0.3)
    said = "Host 1 of 2 waits for the other hosts to connect to host:8471, for at most 300 s."
    assert (said in caplog.text) is waits


@pytest.mark.slow
def test_a_process_of_tensorflow_ends_if_no_other_comes():
    code = (
        "from tftpu.runtime import hosts; hosts.ARRIVE = 2; import tftpu; tftpu.connect();"
        "print('connected')"
    )
    place = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}}
    environ = os.environ | {
        "TF_CONFIG": json.dumps(place | {"task": {"type": "worker", "index": 0}})
    }
    done = warm.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "waits for the other hosts" in done.stderr and "for at most 2 s" in done.stderr
