"""Kills and stops a small training run many times, and counts the losses.

    python -m tests.benchmarks.faults.kill                       # 100 by SIGKILL, 100 by SIGTERM
    python -m tests.benchmarks.faults.kill --kills=5 --terms=5
    KERAS_BACKEND=jax python -m tests.benchmarks.faults.kill --kills=10 --terms=0

Every run is a separate process that trains, saves and is ended from outside, then started again
until all steps are done, and compared with an undisturbed run: all checkpointed variables bit for
bit, and every line of metrics.jsonl. A third of the SIGKILLs come at any moment after the start, a
third at any moment of the training, a third while a checkpoint is being written. TensorFlow is
imported once, by the parent, and initialized by each process after its fork.

On Keras's JAX backend the run is another one: two devices, a `train_step` of the model's own, a
generator as data, callbacks with batch methods.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras

from tests.support.models.training import make_trainer

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

STEPS = 150
_LONGEST = 300.0  # seconds for one process
_ON_JAX = keras.backend.backend() == "jax"
_GROUPS = ("model", "optimizer", "seeds" if _ON_JAX else "ema", "step")


class Started(keras.callbacks.Callback):
    """Tells the parent that training has begun; as a batch method, it is called for each batch."""

    def __init__(self, workdir: Path):
        super().__init__()
        self._workdir = workdir

    def on_train_batch_begin(self, batch, logs=None):
        (self._workdir / "started").touch()


def train_own_step(workdir: Path) -> None:
    """Trains by a `train_step` on the JAX engine, resuming from the workdir's checkpoints."""
    import jax
    import numpy as np

    import tftpu

    class Own(keras.Sequential):
        def measure(self, trainable, untrained, x, y):
            y_pred, untrained = self.stateless_call(trainable, untrained, x, training=True)
            return keras.ops.mean((y_pred - y) ** 2), untrained

        def train_step(self, state, data):
            trainable, untrained, slots, states = state
            differentiate = jax.value_and_grad(self.measure, has_aux=True)
            (loss, untrained), gradients = differentiate(trainable, untrained, *data)
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            return {"mse": loss}, (trainable, untrained, slots, states)

    class WarmUp(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done = int(self.model.optimizer.iterations.value)
            self.model.optimizer.learning_rate = 0.001 * min(1.0, done / 40)

    def draw_batches():
        rng = np.random.default_rng(0)
        while True:
            x = rng.normal(size=(32, 16)).astype("float32")
            yield x, x[:, :4] ** 2

    with tftpu.connect("none", virtual_devices=2).scope():
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense
        dropout = keras.layers.Dropout(0.2)
        model = Own([keras.Input((16,)), dense(256, "relu"), dropout, dense(4)])
        model.compile(keras.optimizers.AdamW(0.001), "mse")
    trainer = make_trainer(model, workdir, log_every=15, checkpoint_every=10, keep=2)
    x = np.random.default_rng(1).normal(size=(100, 16)).astype("float32")
    trainer.fit(
        draw_batches(),
        epochs=3,
        steps_per_epoch=STEPS // 3,
        validation_data=(x, x[:, :4] ** 2),
        callbacks=[Started(workdir), WarmUp()],
    )


def train(workdir: Path) -> None:
    """Trains to the last step, resuming from the workdir's checkpoints."""
    import numpy as np
    import tensorflow as tf

    from tftpu.input_pipelines.reading.epochs import ArrayPipeline

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 16)).astype("float32"), rng.integers(0, 4, 400)

    def augment(examples, seeds):
        return examples[0] + tf.cast(seeds[:, :1], tf.float32) / 2.0**31, examples[1]

    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((16,)),
        keras.layers.Dense(256, "relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(256, "relu"),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.001), loss, metrics=["accuracy"])
    trainer = make_trainer(
        model,
        workdir,
        ema_momentum=0.99,
        steps_per_loop=3,
        log_every=15,
        checkpoint_every=10,
        keep=2,
    )
    trainer.fit(
        ArrayPipeline((x, y), global_batch_size=32, seed=4, prepare=augment),
        steps=STEPS,
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(100),
        eval_every=50,
        callbacks=[Started(workdir)],
    )


class Process:
    """`train` in a child of this process."""

    def __init__(self, workdir: Path):
        workdir.mkdir(parents=True, exist_ok=True)
        self.workdir = workdir
        (workdir / "started").unlink(missing_ok=True)
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run())
        self._code: int | None = None

    def _run(self) -> int:
        from tftpu.errors import Preempted

        with open(self.workdir / "output.txt", "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            (train_own_step if _ON_JAX else train)(self.workdir)
        except Preempted as stopped:
            print(stopped, flush=True)
            return 75
        except BaseException as error:
            print(repr(error), flush=True)
            return 1
        return 0

    def over(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self) -> int:
        while not self.over():
            if time.monotonic() - self.began > _LONGEST:
                raise TimeoutError(f"{self.workdir} hangs: see its output.txt")
            time.sleep(0.005)
        return self._code

    def until_started(self) -> None:
        while not (self.workdir / "started").exists() and not self.over():
            time.sleep(0.002)

    def until_saving(self) -> None:
        while not saving(self.workdir) and not self.over():
            time.sleep(0.0005)

    def send(self, number: int) -> None:
        if not self.over():
            os.kill(self.pid, number)


def saving(workdir: Path) -> bool:
    """Returns whether a checkpoint is partly written."""
    folders = [f for f in (workdir / "checkpoints").glob("*") if f.name.isdigit()]
    return any(not (folder / "manifest.json").exists() for folder in folders)


def newest(workdir: Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 if there is none."""
    found = (workdir / "checkpoints").glob("*/manifest.json")
    return max((int(path.parent.name) for path in found), default=0)


def outcome(workdir: Path) -> tuple[dict[str, bytes], list[dict]]:
    """Returns the results that must not depend on interruptions of a run."""
    folder = workdir / "checkpoints" / str(STEPS)
    variables = {group: (folder / f"{group}.safetensors").read_bytes() for group in _GROUPS}
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "split", "loss", "mse", "accuracy", "grad_norm", "learning_rate")
    return variables, [{k: v for k, v in line.items() if k in kept} for line in lines]


class Bench:
    """An undisturbed run, and its duration."""

    def __init__(self, root: Path):
        self._root = root
        whole = Process(root / "whole")
        whole.until_started()
        self._start = time.monotonic() - whole.began
        assert whole.wait() == 0, self._said(whole)
        self._total = time.monotonic() - whole.began
        self._expected = outcome(whole.workdir)

    def killed(self, index: int) -> dict:
        """Ends a run by SIGKILL at a random moment, and resumes it."""
        rng = random.Random(index)
        workdir, moment = self._root / f"kill-{index}", ("any", "training", "saving")[index % 3]
        while True:
            victim = Process(workdir)
            if moment == "any":
                time.sleep(rng.uniform(0, self._total))
            else:
                victim.until_started()
                time.sleep(rng.uniform(0, self._total - self._start))
            if moment == "saving":
                victim.until_saving()
                time.sleep(rng.uniform(0, 0.01))
            victim.send(signal.SIGKILL)
            if victim.wait() == -signal.SIGKILL:
                break
            shutil.rmtree(workdir)  # it had finished already: try another moment
        result = {"inside a save": saving(workdir), "before any": newest(workdir) == 0}
        return {**result, "equal": self._goes_on(workdir)}

    def stopped(self, index: int) -> dict:
        """Ends a run by SIGTERM at a random moment of the training, and resumes it."""
        rng = random.Random(10_000 + index)
        workdir = self._root / f"term-{index}"
        while True:
            victim = Process(workdir)
            victim.until_started()
            time.sleep(rng.uniform(0, 0.8 * (self._total - self._start)))
            victim.send(signal.SIGTERM)
            code = victim.wait()
            done = newest(workdir) == STEPS and code == -signal.SIGTERM  # while it closed its files
            if code != 0 and not done:
                break
            shutil.rmtree(workdir)  # it had finished already: try another moment
        said, saved = self._said(victim), newest(workdir)
        result = {"75": code == 75, "no step lost": f"after step {saved}, saved" in said}
        if not all(result.values()):
            print(f"{workdir}: exit code {code}, step {saved} saved: {said}", flush=True)
        return {**result, "equal": self._goes_on(workdir)}

    def _goes_on(self, workdir: Path) -> bool:
        again = Process(workdir)
        done = again.wait() == 0 and outcome(workdir) == self._expected
        if done:
            shutil.rmtree(workdir)
        else:
            print(f"{workdir}: {self._said(again)}", flush=True)
        return done

    def _said(self, process: Process) -> str:
        return (process.workdir / "output.txt").read_text()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--terms", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()

    import tensorflow  # noqa: F401 (before the forks; nothing of TensorFlow runs yet)

    import tftpu.input_pipelines.reading.epochs
    import tftpu.training.trainer  # noqa: F401

    root = Path(tempfile.mkdtemp(prefix="tftpu-kill-"))
    began = time.monotonic()
    bench = Bench(root)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        kills = list(pool.map(bench.killed, range(arguments.kills)))
        terms = list(pool.map(bench.stopped, range(arguments.terms)))

    def count(results: list[dict], key: str) -> int:
        return sum(result[key] for result in results)

    print(
        f"{len(kills)} runs killed ({count(kills, 'inside a save')} inside a save, "
        f"{count(kills, 'before any')} before the first checkpoint): "
        f"{count(kills, 'equal')} ended equal to the bit; "
        f"{len(terms)} stopped by SIGTERM: {count(terms, '75')} exited with 75, "
        f"{count(terms, 'no step lost')} lost no step, "
        f"{count(terms, 'equal')} ended equal to the bit ({time.monotonic() - began:.0f} s)"
    )
    wanted = [r["equal"] for r in kills] + [all(r.values()) for r in terms]
    if not all(wanted):
        print(f"Their files are in {root}.")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
