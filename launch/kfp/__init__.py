"""Steps of tftpu for Kubeflow Pipelines, which Vertex AI Pipelines runs as well.

Each step is a command of tftpu with its flags as parameters: `convert`, `check`, `search`, `train`,
`evaluate`, `export` and `predict`. `new_run` names the folder of a pipeline run, and `gate` ends
the pipeline if a metric is not good enough. `training_pipeline` joins them. The extra `kfp`
installs what they need.
"""

from tftpu import installation
from tftpu.errors import UserError

try:
    import kfp  # noqa: F401 (to fail here if it is missing)
except ImportError as error:
    raise UserError(
        "Kubeflow Pipelines, which compiles pipelines, is not installed: run "
        f"`{installation.command('kfp')}`."
    ) from error

from tftpu.launch.kfp.pipelines import training_pipeline
from tftpu.launch.kfp.steps import (
    IMAGE,
    check,
    convert,
    evaluate,
    export,
    gate,
    new_run,
    predict,
    search,
    train,
)

__all__ = [
    "IMAGE",
    "check",
    "convert",
    "evaluate",
    "export",
    "gate",
    "new_run",
    "predict",
    "search",
    "train",
    "training_pipeline",
]
