"""Trains for long in a bucket that fails now and then, and measures what grows.

    python -m tests.benchmarks.faults.soak                  # 100,000 steps
    python -m tests.benchmarks.faults.soak --steps=5000 --disk

A small model trains in its own process, with evaluations and checkpoints; the bucket is on
loopback in this process, and refuses everything for 3 seconds of each minute. Memory, descriptors
and threads of the training process, and the bytes that the bucket takes, are sampled over the run,
and a line is fitted through each, without the first third of the run, in which pools and caches
fill. Some uploads follow the clock, so the fit of the bytes per step knows the seconds per step,
too; bytes that the bucket refuses are counted apart. It fails if one of the slopes is not flat.
(Every checkpoint holds the history of the run, as Keras defines it: some 180 bytes for each
evaluation.)
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

OUTAGE, EVERY = 3.0, 60.0  # seconds
SAMPLES = 100
# The largest slope per 1,000 steps that counts as flat, and the growth that any run may have: that
# is noise. Uploads are the growth of the bytes per step over the run, as a share of their mean.
FLAT = {"memory MiB": (0.05, 3.0), "descriptors": (0.02, 2.0), "threads": (0.02, 1.0)}
FLAT_UPLOADS = 0.2


def train(workdir: str, steps: int, sampled, environment: dict[str, str]) -> None:
    """Trains, and sends the step and what the process holds through a pipe."""
    os.environ.update(environment, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import gc

    import keras
    import psutil
    import tensorflow as tf

    from tests.support.models.training import make_trainer
    from tftpu.input_pipelines.reading.epochs import ArrayPipeline

    process, every = psutil.Process(), max(10, steps // SAMPLES // 10 * 10)

    class Sample(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations.numpy())
            if step % every == 0:
                gc.collect()
                memory = process.memory_info()
                own = (memory.rss - memory.shared) / 2**20  # without the libraries' files
                sampled.send((step, own, process.num_fds(), process.num_threads()))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 16)).astype("float32"), rng.integers(0, 4, 400)
    layers = [keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
    trainer = make_trainer(
        model, workdir, steps_per_loop=10, log_every=50, checkpoint_every=500, keep=2
    )
    trainer.fit(
        ArrayPipeline(
            (x, y), global_batch_size=32, seed=4, prepare=lambda examples, seeds: examples
        ),
        steps=steps,
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(100),
        eval_every=2000,
        callbacks=[Sample()],
        verbose=0,
    )
    sampled.close()


@contextlib.contextmanager
def failing_now_and_then(service) -> Iterator[None]:
    """Lets a service answer 503 to everything for some seconds of each minute."""
    from tests.support.fakes.fake_storage import Fault

    over = threading.Event()

    def run() -> None:
        while not over.wait(EVERY - OUTAGE):
            service.faults += [Fault(m, ".", 503, None) for m in ("GET", "POST", "PUT", "DELETE")]
            over.wait(OUTAGE)
            service.faults.clear()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the slope of a line through points, by least squares."""
    return float(np.polyfit(x, y, 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--disk", action="store_true", help="train on a local disk instead")
    arguments = parser.parse_args()
    from tests.support.fakes import gs_proxy
    from tests.support.fakes.fake_storage import BUCKET

    spawn = multiprocessing.get_context("spawn")
    rows, began = [], time.monotonic()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service, environment = stack.enter_context(gs_proxy.serving(scratch))
        stack.enter_context(failing_now_and_then(service))
        workdir = str(scratch / "run") if arguments.disk else f"gs://{BUCKET}/run"
        samples, sampled = spawn.Pipe(duplex=False)
        child = spawn.Process(target=train, args=(workdir, arguments.steps, sampled, environment))
        child.start()
        sampled.close()
        with contextlib.suppress(EOFError):
            while True:
                rows.append((*samples.recv(), service.uploaded, time.monotonic() - began))
                if sys.stdout.isatty() or len(rows) % 10 == 0:
                    print(f"{rows[-1][-1]:7.0f} s", *rows[-1][:-1], flush=True)
        child.join()
        if child.exitcode:
            print(f"The run ended with exit code {child.exitcode}.")
            return 1
        if arguments.disk:
            written = (scratch / "run/metrics.jsonl").read_bytes()
        else:
            written = service.content("run/metrics.jsonl")
        print(f"refused by the bucket: {service.refused:,} of {service.uploaded:,} bytes")
    return report(np.array(rows), [json.loads(line) for line in written.splitlines()], began)


def report(rows: np.ndarray, lines: list[dict], began: float) -> int:
    """Prints the slopes; returns the exit code."""
    steps = int(rows[-1, 0])
    late = rows[len(rows) // 3 :]
    thousands = late[:, 0] / 1000
    print(f"{steps:,} steps in {time.monotonic() - began:,.0f} s")
    good = True
    for column, (name, (flat, noise)) in enumerate(FLAT.items(), start=1):
        found = slope(thousands, late[:, column])
        good &= found <= flat or found * (thousands[-1] - thousands[0]) <= noise
        first, last = late[0, column], late[-1, column]
        print(f"{name:12} {found:+.4f} per 1,000 steps ({first:,.1f} to {last:,.1f})")
    if rows[-1, 4]:
        each, pace = (np.diff(late[:, n]) / np.diff(late[:, 0]) for n in (4, 5))  # for a step
        known = np.stack([thousands[1:], pace, np.ones_like(pace)], axis=1)
        found = np.linalg.lstsq(known, each, rcond=None)[0][0]
        growth = found * (thousands[-1] - thousands[0]) / each.mean()
        good &= growth <= FLAT_UPLOADS
        print(f"{'uploads':12} {each.mean():,.0f} bytes a step, {growth:+.1%} over the run")
    logged = [line["step"] for line in lines if line["split"] == "train"]
    missing = set(range(50, steps + 1, 50)) - set(logged)
    good &= not missing and len(logged) == len(set(logged))
    print(f"{'lines':12} {len(logged):,} of training, {len(missing)} missing")
    print("All flat." if good else "NOT FLAT.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
