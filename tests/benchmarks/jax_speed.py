"""Times a training step on the JAX engine beside its bare `jax.jit` and Keras's own `fit` on JAX.

    python -m tests.benchmarks.jax_speed [CONFIG] [DEVICES] [MESH]

The contestants take turns of the same number of steps, so that other load on the machine affects
them alike; medians over the turns are printed, and the ratios of the first to the others.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tensorflow as tf

import tftpu
from tftpu.engines.jax import feed
from tftpu.engines.jax.placement import mesh as meshes
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import config_flags

TURNS, STEPS = 15, 20


def main(name: str = "digits_resnet", devices: str = "1", mesh: str | None = None) -> None:
    """Prints milliseconds per step of each contestant, and the ratios between them."""
    engine: Any = tftpu.connect("none", virtual_devices=int(devices), engine="jax", mesh=mesh)
    experiment = build.resolve_length(config_flags.load(name, []))
    experiment.validate(engine.data_shards)
    first = next(iter(engine.batches(build.build_training_data(experiment), 0)))
    data = tf.data.Dataset.from_tensors(first).repeat()
    contestants = {
        "trainer": trainer(experiment, engine, data),
        "bare step": bare(experiment, engine, data),
    }
    if int(devices) == 1:  # Keras's fit uses one device
        contestants["keras fit"] = keras_fit(experiment, engine, data)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(TURNS + 1):
        for contestant, run in contestants.items():
            began = time.perf_counter()
            run()
            if turn:  # the first compiles
                times[contestant].append((time.perf_counter() - began) / STEPS * 1e3)
    medians = {contestant: statistics.median(found) for contestant, found in times.items()}
    print(f"{name}: {engine.description}; medians of {TURNS} turns of {STEPS} steps")
    for contestant, median in medians.items():
        print(f"  {contestant:10}  {median:8.2f} ms per step")
    own = times["trainer"]
    for contestant in list(times)[1:]:
        ratios = [mine / other for mine, other in zip(own, times[contestant])]
        print(f"  trainer / {contestant}: {statistics.median(ratios):.3f}")


def trainer(experiment: Any, engine: Any, data: Any) -> Callable[[], None]:
    """Returns a turn of the trainer's loop, with data of the host."""
    executor, spec = _executor(experiment, engine, data)
    loop, batches = executor.training(spec), engine.batches(data, 0)
    return lambda: loop.run(batches, STEPS)


def bare(experiment: Any, engine: Any, data: Any) -> Callable[[], None]:
    """Returns a turn of the same step under `jax.jit`, with a batch that is on the devices."""
    executor, spec = _executor(experiment, engine, data)
    state, step = executor.variables, executor.training(spec).step
    train = jax.jit(step.train, static_argnums=4, donate_argnums=(0, 1))
    batch = feed.place_batch(
        next(iter(engine.batches(data, 0))), state.layout, meshes.BatchShard(0, 1)
    )
    held = [
        state.values(),
        jax.device_put(np.zeros(step.sums.size, np.float32), state.layout.whole),
    ]

    def turn() -> None:
        for number in range(STEPS):
            held[:] = train(*held, np.int32(number), batch, (0,))
        jax.block_until_ready(held)

    return turn


def keras_fit(experiment: Any, engine: Any, data: Any) -> Callable[[], None]:
    """Returns a turn of Keras's own `fit`."""
    with engine.scope():
        model = build.build_model(experiment, jit_compile=True)
    return lambda: model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0)


def _executor(experiment: Any, engine: Any, data: Any) -> tuple[Any, Any]:
    with engine.scope():
        model = build.build_model(experiment)
    microbatches = experiment.train.gradient_accumulation_steps
    spec = engine.training_spec(data, microbatches)
    return engine.prepare(model, experiment.train, spec), spec


if __name__ == "__main__":
    main(*sys.argv[1:])
