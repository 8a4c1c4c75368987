"""tftpu: train TensorFlow/Keras 3 models on Cloud TPUs, and on whatever else is there.

`import tftpu` imports neither TensorFlow nor Keras: TPU environment variables have to be set
before TensorFlow loads, and `tftpu --help` should answer at once. The names below load what they
need when they are first used (PEP 562).
"""

import importlib
import os

from tftpu.tpu import environment
from tftpu.version import __version__

# Keras reads this once, at import. The step is written against TensorFlow's `tf.distribute`.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
environment.prepare()

_LAZY = {
    "Experiment": "tftpu.config",
    "Trainer": "tftpu.training.trainer",
    "UserError": "tftpu.errors",
    "connect": "tftpu.engines.tensorflow.cluster",
    "set_precision": "tftpu.optim.precision",
    "simulated_slice": "tftpu.engines.tensorflow.cluster",
}
_SUBMODULES = ("models", "input_pipelines", "preflight")

__all__ = ["Experiment", "Trainer", "UserError", "__version__", "connect", "set_precision"]
__all__ += ["simulated_slice"]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"tftpu.{name}")
    raise AttributeError(f"module 'tftpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
