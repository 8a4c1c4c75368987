"""Times the contestants of `tftpu bench`, such as the trainer and Keras's `fit`, in turns."""

import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tftpu
from tftpu import input_pipelines
from tftpu.config import Experiment
from tftpu.engines.engine import Engine
from tftpu.errors import UserError
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import own_code
from tftpu.training.arguments import LOOP_STEPS

TURNS = 20
FOREVER = 1_000_000


def run(experiment: Experiment, name: str, *, compare: bool) -> None:
    """Times the trainer, a bare step, the pipeline and optionally Keras's `fit`; prints the times.

    Args:
        experiment: an experiment with valid fields; `UserError` if it does not fit the devices.
        name: name of the config, for the first line.
        compare: whether to time Keras's own `fit` as well.
    """
    engine = build.connect(experiment)
    own_code.validate(experiment, engine.data_shards)
    precision = tftpu.set_precision(experiment.train.precision)
    experiment = build.resolve_length(experiment)
    experiment.train.checkpoint_every = 0
    experiment.train.best_metric = ""  # the benchmark evaluates nothing
    # If it is not set, a callback with batch methods shortens each device loop to one step.
    loop = experiment.train.steps_per_loop = experiment.train.steps_per_loop or LOOP_STEPS
    # A turn has at least one log line, and whole device loops: callbacks run only between them.
    steps = math.ceil(experiment.train.log_every / loop) * loop
    contestants: dict[str, Contestant] = {
        "trainer": lambda turn: _run_trainer(experiment, engine, turn),
        "bare step": lambda turn: _run_bare_step(experiment, engine, turn),
        "pipeline": lambda turn: _run_pipeline(experiment, engine, turn),
    }
    on_jax = keras.config.backend() == "jax"
    if compare and on_jax and engine.hardware.chips > 1:
        raise UserError(
            f"--compare runs Keras's fit on one device, but this config has {engine.description}: "
            "leave out --compare, or the mesh."
        )
    if compare and build.has_objectives(experiment):
        raise UserError(
            f"{type(experiment.model).__name__} has objectives(), which Keras's fit does not "
            "support: leave out --compare."
        )
    if compare:
        contestants["keras fit"] = lambda turn: _run_keras_fit(experiment, engine, turn, "auto")
        if not on_jax:  # on JAX, `fit` without XLA runs each operation separately
            contestants["keras fit, no XLA"] = lambda turn: _run_keras_fit(
                experiment, engine, turn, False
            )
    times = take_turns(contestants, steps)
    print(
        f"{name}: {engine.description}, {precision}, "
        f"{experiment.data.global_batch_size} examples per step; "
        f"medians of {TURNS} turns of {steps} steps"
    )
    for contestant, seconds in times.items():
        milliseconds = statistics.median(seconds) / steps * 1000
        ratio = statistics.median(a / b for a, b in zip(times["trainer"], seconds))
        compared = "" if contestant == "trainer" else f"   trainer / {contestant}: {ratio:.3f}"
        print(f"  {contestant:18} {milliseconds:9.3f} ms/step{compared}")


def take_turns(contestants: dict[str, "Contestant"], steps: int) -> dict[str, list[float]]:
    """Runs the contestants in turn, repeatedly, each in its own thread.

    Args:
        contestants: the contestants by name; each calls its `ContestantThread` after every step or
            device loop, with the number of steps since the last call.
        steps: number of steps in a turn.

    Returns:
        The seconds of each contestant's turns, without the first turn, in which programs compile.
    """
    names = list(contestants)
    turns = {name: ContestantThread(contestants[name], steps) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(TURNS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = turns[name].run_turn()
            if number:
                times[name].append(seconds)
    for turn in turns.values():
        turn.end()
    return times


class ContestantStopped(BaseException):
    """Raised in a contestant's thread to end it."""


class ContestantThread:
    """A thread that runs a contestant of the benchmark, which waits between its turns.

    Args:
        contestant: the function to run.
        steps: number of steps in a turn.
    """

    def __init__(self, contestant: "Contestant", steps: int):
        self.steps = steps
        self._contestant = contestant
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        self._error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run_turn(self) -> float:
        """Lets the contestant run for a turn; returns the seconds it took, or raises its error."""
        self._left = self.steps
        start = time.perf_counter()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return time.perf_counter() - start

    def end(self) -> None:
        """Ends the thread."""
        self._over = True
        self._go.release()
        self._thread.join()

    def __call__(self, steps: int) -> None:
        """Counts steps that the contestant has run; at the end of its turn, waits for the next."""
        self._left -= steps
        if self._left <= 0:
            _wait_for_devices()
            self._done.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._over:
            raise ContestantStopped

    def _run(self) -> None:
        try:
            self._wait()
            self._contestant(self)
        except ContestantStopped:
            pass
        except BaseException as error:
            self._error = error
            self._done.release()


def _wait_for_devices() -> None:
    """Waits for JAX's pending computations, because a step returns before they are done."""
    if keras.config.backend() == "jax":
        import jax

        jax.block_until_ready(jax.live_arrays())


# A function that runs steps until the call of its `ContestantThread` raises `ContestantStopped`.
Contestant = Callable[[ContestantThread], None]


class TurnCallback(keras.callbacks.Callback):
    """A callback that reports steps of `fit` to a `ContestantThread`, which waits between turns."""

    def __init__(self, turn: ContestantThread):
        super().__init__()
        self._turn, self._seen = turn, 0

    def on_train_batch_begin(self, batch, logs=None):
        # `batch` is the number of all previous steps: the benchmark has one epoch without end.
        if batch > self._seen:
            self._turn(batch - self._seen)
            self._seen = batch


def _run_trainer(experiment: Experiment, engine: Engine, turn: ContestantThread) -> None:
    """Runs all that `tftpu train` runs in a step: pipeline, device loop, log, event files."""
    with tempfile.TemporaryDirectory() as workdir:
        with engine.scope():
            trainer = build.build_trainer(experiment, workdir)
        trainer.fit(
            build.build_training_data(experiment),
            steps=FOREVER,
            callbacks=[TurnCallback(turn)],
            verbose=False,
        )


def _run_bare_step(experiment: Experiment, engine: Engine, turn: ContestantThread) -> None:
    """Runs the training step in a bare loop, on one batch that is already on the device."""
    data = build.build_training_data(experiment)
    microbatches = experiment.train.gradient_accumulation_steps
    with engine.scope():
        model = build.build_model(experiment)
    spec = engine.training_spec(data, microbatches, None)
    own = build.build_objectives(experiment, model)
    executor = engine.prepare(model, experiment.train, spec, own)
    step = executor.bare(spec, next(engine.batches(data, 0, None, None)))
    while True:
        step(turn.steps)
        turn(turn.steps)


def _run_pipeline(experiment: Experiment, engine: Engine, turn: ContestantThread) -> None:
    """Runs only the input pipeline."""
    for _ in engine.batches(build.build_training_data(experiment), 0, None, None):
        turn(1)


def _run_keras_fit(
    experiment: Experiment, engine: Engine, turn: ContestantThread, jit_compile: bool | str
) -> None:
    """Runs Keras's own trainer, on the same model, batches and devices."""
    with engine.scope():
        model = build.build_model(experiment, jit_compile=jit_compile)
    data = input_pipelines.starting_at(build.build_training_data(experiment), 0)
    data = data.prefetch(tf.data.AUTOTUNE)
    # Keras annotates `verbose` as text only.
    verbose: Any = 0
    model.fit(data, steps_per_epoch=FOREVER, verbose=verbose, callbacks=[TurnCallback(turn)])
