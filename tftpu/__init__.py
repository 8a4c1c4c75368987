"""tftpu: train Keras 3 models on Cloud TPUs, and on GPUs and CPUs with the same code.

`import tftpu` imports neither TensorFlow nor Keras: TPU environment variables have to be set
before TensorFlow loads, and `tftpu --help` should answer at once. The names below load what they
need when they are first used (PEP 562); type checkers see them as plain imports.
"""

import importlib
from typing import TYPE_CHECKING

from tftpu.engines import backend
from tftpu.tpu import environment
from tftpu.version import __version__

if TYPE_CHECKING:
    from tftpu import input_pipelines, models, preflight
    from tftpu.config import (
        ClusterConfig,
        DataConfig,
        DataContext,
        Experiment,
        ModelConfig,
        OptimizerConfig,
        TrainConfig,
    )
    from tftpu.engines.collectives import all_gather, positions
    from tftpu.engines.engine import Engine
    from tftpu.engines.objectives.objective import Objective
    from tftpu.engines.selection import connect
    from tftpu.errors import DivergedError, HostLost, Preempted, UserError
    from tftpu.inference.generate import generate
    from tftpu.models.keras_hub.config import KerasHub
    from tftpu.observe.writers import Writer
    from tftpu.optim.precision import set_precision
    from tftpu.preflight.simulated import simulated_slice
    from tftpu.training.trainer import Trainer

backend.prefer_tensorflow()
environment.prepare()
environment.quieten_tensorflow()

_LAZY = {
    "ClusterConfig": "tftpu.config",
    "DataConfig": "tftpu.config",
    "DataContext": "tftpu.config",
    "DivergedError": "tftpu.errors",
    "Engine": "tftpu.engines.engine",
    "Experiment": "tftpu.config",
    "HostLost": "tftpu.errors",
    "KerasHub": "tftpu.models.keras_hub.config",
    "ModelConfig": "tftpu.config",
    "Objective": "tftpu.engines.objectives.objective",
    "OptimizerConfig": "tftpu.config",
    "Preempted": "tftpu.errors",
    "TrainConfig": "tftpu.config",
    "Trainer": "tftpu.training.trainer",
    "UserError": "tftpu.errors",
    "Writer": "tftpu.observe.writers",
    "all_gather": "tftpu.engines.collectives",
    "connect": "tftpu.engines.selection",
    "generate": "tftpu.inference.generate",
    "positions": "tftpu.engines.collectives",
    "set_precision": "tftpu.optim.precision",
    "simulated_slice": "tftpu.preflight.simulated",
}
# These names need Keras 3.
_TRAINS = ("Trainer", "connect", "generate", "set_precision", "simulated_slice")
_SUBMODULES = ("input_pipelines", "models", "preflight")

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "DataContext",
    "DivergedError",
    "Engine",
    "Experiment",
    "HostLost",
    "KerasHub",
    "ModelConfig",
    "Objective",
    "OptimizerConfig",
    "Preempted",
    "TrainConfig",
    "Trainer",
    "UserError",
    "Writer",
    "__version__",
    "all_gather",
    "connect",
    "generate",
    "input_pipelines",
    "models",
    "positions",
    "preflight",
    "set_precision",
    "simulated_slice",
]


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name in _TRAINS:
            backend.check_keras()
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        if name in _SUBMODULES:
            return importlib.import_module(f"tftpu.{name}")
        from tftpu.config import renamed

        raise renamed.explain_missing(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_SUBMODULES])
