"""TEMPORARY: the core's coming API over today's. Delete this file when the core has it.

Then `connect` is `tftpu.connect`, `trainer` is `tftpu.Trainer`, `fit` is its method, and
`best_of`, `step_of`, `rate_of` and `usd_of` are attributes. Callers need no other change.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tftpu.config import Train
from tftpu.engines.tensorflow import cluster
from tftpu.runtime.hosts import Hosts
from tftpu.training.trainer import Trainer


class Engine:
    """The part of the engine protocol that the command line uses.

    Attributes:
        data_shares: number of shares that a global batch is cut into.
        hosts: the hosts of the run.
        strategy: TensorFlow's strategy.
    """

    def __init__(self, strategy: Any):
        self.strategy = strategy
        self.data_shares: int = strategy.num_replicas_in_sync
        self.hosts = Hosts(strategy)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope that models are built in."""
        return self.strategy.scope()


def connect(tpu: str = "auto", virtual_devices: int | None = None) -> Engine:
    """Connects to the devices."""
    return Engine(cluster.connect(tpu, virtual_devices))


def trainer(
    model: keras.Model,
    workdir: str | None,
    options: Train,
    *,
    engine: Engine | None = None,
    hyperparameters: Mapping[str, bool | int | float | str] | None = None,
    sample: Callable[[Trainer], str] | None = None,
) -> Trainer:
    """Makes a trainer of a compiled model."""
    del engine  # today the model knows its strategy
    only_of_configs = ("steps", "eval_every", "label_smoothing", "precision", "watchdog_seconds")
    fields = {name: value for name, value in vars(options).items() if name not in only_of_configs}
    return Trainer(
        model,
        workdir,
        **fields,
        watchdog=options.watchdog_seconds,
        config=dict(hyperparameters or {}),
        sample=sample,
    )


def fit(trainer: Trainer, *arguments: Any, verbose: bool = True, **keywords: Any) -> Any:
    """Trains, as `Trainer.fit` does."""
    trainer.verbose = verbose
    return trainer.fit(*arguments, **keywords)


def step_of(trainer: Trainer) -> int:
    """Returns the number of steps trained."""
    return 0 if trainer.step is None else int(trainer.step.step.numpy())


def seconds_of(trainer: Trainer) -> dict[str, float]:
    """Returns the seconds that each part of the run took, over all its starts."""
    return trainer.account.seconds() if trainer.account is not None else {}


def restarts_of(trainer: Trainer) -> int:
    """Returns how often the run was resumed."""
    return trainer.account.restarts if trainer.account is not None else 0


def usd_of(trainer: Trainer) -> float | None:
    """Returns what the run has cost so far at list price; None where there is no price."""
    return trainer.account.facts.get("usd") if trainer.account is not None else None
