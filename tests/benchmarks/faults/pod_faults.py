"""Kills, stops and preempts hosts of a run on the JAX engine, and counts the losses.

    python -m tests.benchmarks.faults.pod_faults                # 40 rounds
    python -m tests.benchmarks.faults.pod_faults --first=27 --rounds=13

In each round four processes on loopback train together, with four devices in all. At a random
moment, in half of the rounds while a checkpoint is being written, a random process is killed
(SIGKILL), stands still (SIGSTOP) or is asked to stop (SIGTERM). The command is then started again,
in every second round with another number of processes, and its end compared with a run that nobody
disturbed: to the bit with four processes, by its losses and weights with others. JAX and TensorFlow
are imported once, by the parent, and initialized by each process after its fork.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.support.fakes.host_processes import free_ports
from tests.support.programs.jax_process import QUICK

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = QUICK

HOSTS = 4
STEPS = 200
EVERY = 10  # steps between two checkpoints
LOST = 6.0  # seconds after which a host is lost
_LONGEST = 200.0  # seconds for one start
_CLOSE = 1e-3  # of losses and weights after sums in another order
_GROUPS = ("model", "optimizer", "ema", "step")


def train(workdir: Path, count: int) -> None:
    """Trains to the last step, resuming from the workdir's checkpoints."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tftpu
    from tftpu.input_pipelines.reading.epochs import ArrayPipeline

    class Started(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            (workdir / "started").touch()

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 16)).astype("float32"), rng.integers(0, 4, 400)

    def augment(examples, seeds):
        return examples[0] + tf.cast(seeds[:, :1], tf.float32) / 2.0**31, examples[1]

    engine = tftpu.connect(
        "none", virtual_devices=HOSTS // count, mesh="fsdp:4", engine="jax", host_timeout=LOST
    )
    keras.utils.set_random_seed(3)
    with engine.scope():
        layers = [
            keras.Input((16,)),
            keras.layers.Dense(512, "tanh"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(512, "tanh"),
            keras.layers.Dense(4),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02, 0.9), loss, metrics=["accuracy"])
    options = tftpu.TrainConfig(
        ema_momentum=0.99, steps_per_loop=5, log_every=20, checkpoint_every=EVERY, keep=2
    )
    tftpu.Trainer(model, str(workdir), options, engine=engine).fit(
        ArrayPipeline((x, y), global_batch_size=32, seed=4, prepare=augment),
        steps=STEPS,
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(100),
        eval_every=50,
        callbacks=[Started()],
        verbose=0,
    )


class Host:
    """`train` in a child of this process."""

    def __init__(self, workdir: Path, index: int, count: int, addresses: list[str]):
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            task = {"type": "worker", "index": index}
            if count > 1:
                config = {"cluster": {"worker": addresses}, "task": task}
                os.environ["TF_CONFIG"] = json.dumps(config)
            with open(workdir / f"output-{index}.txt", "a") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            self._run(workdir, count)

    def _run(self, workdir: Path, count: int) -> None:
        """Trains, and exits as `tftpu train` does."""
        from tftpu.errors import HostLost, Preempted

        code = 0
        try:
            train(workdir, count)
        except Preempted as stopped:
            print(stopped, flush=True)
            code = 75
        except HostLost as lost:
            print(lost, flush=True)
            code = 69
        except BaseException:
            traceback.print_exc()
            code = 1
        try:
            sys.exit(code)
        finally:  # as at the end of any Python, which a fork's parent never reached
            import atexit

            atexit._run_exitfuncs()
            os._exit(code)

    def over(self) -> bool:
        """Returns whether the process ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def send(self, number: int) -> None:
        """Sends a signal, unless the process ended."""
        if not self.over():
            os.kill(self.pid, number)


class Pod:
    """The processes of one start of the command."""

    def __init__(self, workdir: Path, count: int):
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "started").unlink(missing_ok=True)
        self.workdir = workdir
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.hosts = [Host(workdir, index, count, addresses) for index in range(count)]
        self._began = time.monotonic()

    def until(self, condition) -> bool:
        """Waits for a condition; returns whether it came before a process ended."""
        while not condition():
            if any(host.over() for host in self.hosts):
                return False
            self._check()
            time.sleep(0.0005)
        return True

    def codes(self, left_out: Host | None = None) -> list[int | None]:
        """Waits for all processes but one; returns their exit codes."""
        waited = [host for host in self.hosts if host is not left_out]
        while sum(host.over() for host in waited) < len(waited):
            self._check()
            time.sleep(0.005)
        return [host.code for host in waited]

    def _check(self) -> None:
        if time.monotonic() - self._began > _LONGEST:
            for host in self.hosts:
                host.send(signal.SIGKILL)
            raise TimeoutError(f"{self.workdir} hangs: see its output-*.txt")


def complete(workdir: Path) -> list[int]:
    """Returns the steps of the complete checkpoints."""
    return sorted(int(p.parent.name) for p in (workdir / "checkpoints").glob("*/manifest.json"))


def saving(workdir: Path) -> bool:
    """Returns whether a checkpoint is partly written."""
    folders = [f for f in (workdir / "checkpoints").glob("*") if f.name.isdigit()]
    return any(not (folder / "manifest.json").exists() for folder in folders)


def variables(workdir: Path) -> dict:
    """Returns the arrays of the last checkpoint's files, by group and name."""
    from tftpu.storage import safetensors

    folder = workdir / "checkpoints" / str(STEPS)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    found = {}
    for name in listed:
        group = name.split(".")[0].split("-")[0]
        if group in _GROUPS:
            arrays = safetensors.decode((folder / name).read_bytes())
            found |= {f"{group} {key}": array for key, array in arrays.items()}
    return found


def lines(workdir: Path) -> list[dict]:
    """Returns what the run logged, without times."""
    kept = ("step", "split", "loss", "accuracy", "grad_norm", "learning_rate")
    text = (workdir / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k in kept} for line in text.splitlines()]


@dataclasses.dataclass(frozen=True)
class Round:
    """One fault, and what became of the run.

    Attributes:
        signal: that a process was sent.
        inside: whether a checkpoint was being written.
        restarted: the number of processes that the command was started again with.
        noticed: seconds until all other processes had ended.
        ended: whether they ended with the exit code that belongs to the signal.
        kept: whether every complete checkpoint that was needed stayed so.
        equal: whether the run ended as the undisturbed one.
    """

    signal: str
    inside: bool
    restarted: int
    noticed: float
    ended: bool
    kept: bool
    equal: bool


class Drill:
    """An undisturbed run, and the rounds that are compared with it."""

    def __init__(self, root: Path):
        self._root = root
        whole = Pod(root / "whole", HOSTS)
        whole.until((whole.workdir / "started").exists)
        started = time.monotonic()
        found = whole.codes()
        assert found == [0] * HOSTS, (found, whole.workdir)
        self._seconds = time.monotonic() - started
        self._variables, self._lines = variables(whole.workdir), lines(whole.workdir)

    def round(self, index: int) -> Round:
        """Sends a signal at a random moment, and starts the command again."""
        rng = random.Random(index)
        workdir = self._root / f"round-{index}"
        number = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)[index % 3]
        count = HOSTS if index % 2 == 0 else rng.choice((1, 2))
        inside = index % 4 < 2
        while True:
            pod = Pod(workdir, HOSTS)
            victim = rng.choice(pod.hosts)
            running = pod.until((workdir / "started").exists)
            time.sleep(rng.uniform(0, 0.7 * self._seconds))
            if inside:
                running = running and pod.until(lambda: saving(workdir))
            before, cut = complete(workdir), saving(workdir)
            victim.send(number)
            sent = time.monotonic()
            if running and victim.code is None and STEPS not in before:
                break
            victim.send(signal.SIGKILL)  # it had finished already: another moment
            pod.codes()
            shutil.rmtree(workdir)
        others = pod.codes(left_out=victim)
        noticed = time.monotonic() - sent
        if number != signal.SIGTERM:
            victim.send(signal.SIGKILL)
        pod.codes()
        after = complete(workdir)
        kept = not before or bool(after and after[-1] >= before[-1])
        wanted = 75 if number == signal.SIGTERM else 69
        again = Pod(workdir, count).codes()
        found = Round(
            signal=number.name,
            inside=cut,
            restarted=count,
            noticed=noticed,
            ended=others == [wanted] * len(others),
            kept=kept,
            equal=again == [0] * count and self._equal(workdir, count),
        )
        print(f"{index}: {found}, codes {others}", flush=True)
        if found.ended and found.kept and found.equal:
            shutil.rmtree(workdir)
        return found

    def _equal(self, workdir: Path, count: int) -> bool:
        """Returns whether a run ended as the undisturbed one."""
        import numpy as np

        found, logged = variables(workdir), lines(workdir)
        if count == HOSTS:
            same = all(
                np.array_equal(found[name], value) for name, value in self._variables.items()
            )
            return found.keys() == self._variables.keys() and same and logged == self._lines
        if [(line["step"], line["split"]) for line in logged] != [
            (line["step"], line["split"]) for line in self._lines
        ]:
            return False
        pairs = [(f["loss"], e["loss"]) for f, e in zip(logged, self._lines)]
        pairs += [(found[name], value) for name, value in self._variables.items()]
        return all(
            np.linalg.norm(np.subtract(a, b)) <= _CLOSE * max(np.linalg.norm(b), 1e-3)
            for a, b in pairs
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()

    import jax  # noqa: F401 (before the forks; nothing of it runs yet)
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import tftpu.engines.jax.cluster
    import tftpu.input_pipelines.reading.epochs
    import tftpu.training.trainer  # noqa: F401

    root = Path(tempfile.mkdtemp(prefix="tftpu-pod-"))
    began = time.monotonic()
    drill = Drill(root)
    chosen = range(arguments.first, arguments.first + arguments.rounds)
    rounds = [drill.round(index) for index in chosen]
    for kind in sorted({one.signal for one in rounds}):
        of_kind = [one for one in rounds if one.signal == kind]
        seconds = sorted(one.noticed for one in of_kind)
        print(
            f"{kind}: {len(of_kind)} rounds, {sum(r.inside for r in of_kind)} inside a save; "
            f"{sum(r.ended for r in of_kind)} with the right exit codes; the others had ended "
            f"after {seconds[len(seconds) // 2]:.1f} s (median), {seconds[-1]:.1f} s (longest)"
        )
    same = [one for one in rounds if one.restarted == HOSTS]
    other = [one for one in rounds if one.restarted != HOSTS]
    print(
        f"{sum(r.kept for r in rounds)} of {len(rounds)} kept every checkpoint that was complete; "
        f"started again with {HOSTS} processes, {sum(r.equal for r in same)} of {len(same)} ended "
        f"equal to the bit; with another number, {sum(r.equal for r in other)} of {len(other)} "
        f"equal to {_CLOSE:g} ({time.monotonic() - began:.0f} s, a host is lost after {LOST:.0f} s)"
    )
    if not all(one.ended and one.kept and one.equal for one in rounds):
        print(f"Files of the rounds that failed are in {root}.")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
