"""The parts of a trainer that a session of training works with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tftpu.checkpoint.frozen_base import Base
from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.config import TrainConfig
from tftpu.engines.engine import Engine, Executor
from tftpu.observe.profiler import Profiler
from tftpu.runtime.goodput import Account
from tftpu.runtime.watchdog import Watchdog
from tftpu.storage import files, side_files
from tftpu.training.progress import RunProgress


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The parts of a `Trainer` that outlive one call of `fit`.

    Attributes:
        model: the Keras model.
        engine: runs its steps.
        executor: the model on the engine's devices.
        options: of training.
        workdir: of the run; None: it has none.
        saves: whether this process writes checkpoints, or its part of them.
        checkpoints: of the workdir; None: it has none.
        base: the weights that they leave out.
        account: of the run's time.
        profiler: takes traces.
        watchdog: ends a run that hangs.
        evaluate: runs an evaluation.
        restore: loads the newest checkpoint, or that of a step; None if there is none.
        config: the experiment of the workdir, as JSON; None: it has none.
        before: the progress after the last call of `fit`.
    """

    model: keras.Model
    engine: Engine
    executor: Executor
    options: TrainConfig
    workdir: str | None
    saves: bool
    checkpoints: Checkpoints | None
    base: Base
    account: Account
    profiler: Profiler
    watchdog: Watchdog
    evaluate: Callable[[Any], dict[str, float]]
    restore: Callable[[], Restored | None]
    config: dict[str, Any] | None
    before: RunProgress


def config_of(workdir: str | None) -> dict[str, Any] | None:
    """Returns the experiment of a workdir as JSON; None if it has none."""
    return side_files.read(files.join(workdir, "config.json")) if workdir else None
