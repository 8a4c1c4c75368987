"""TFX: `run_fn` of its Trainer component, which trains a config on the examples of a pipeline.

Trainer(run_fn="tftpu.launch.tfx.run_fn", custom_config={"config": "iris.py"}, …)
"""

from tftpu.launch.tfx.examples import Examples
from tftpu.launch.tfx.run import run_fn

__all__ = ["Examples", "run_fn"]
