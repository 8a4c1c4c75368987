"""Suggests the run to begin in place of one that cannot resume."""

from tftpu.checkpoint import manifest
from tftpu.config import Experiment
from tftpu.models import sizes
from tftpu.storage import files


def suggest_run(experiment: Experiment, workdir: str, *, with_weights: bool = True) -> str:
    """Returns a text with the flags that start another run, such as "--workdir=runs/mine_2".

    Args:
        experiment: the experiment that cannot resume.
        workdir: folder of the run that cannot resume; it has checkpoints.
        with_weights: whether the weights of the run fit the experiment's model. If they do, the
            flags set `model.init_from` to them, except for models from outside the zoo, and with
            adapters, whose `init_from` names the base weights.
    """
    folder = f"--workdir={files.suggest_path(workdir)}"
    model = experiment.model
    if not with_weights or model.lora or type(model).__module__ != sizes.__name__:
        return folder
    checkpoints = files.join(workdir, "checkpoints")
    weights = files.join(checkpoints, str(max(manifest.list_steps(checkpoints))))
    return f"{folder}, where --config.model.init_from={weights} adds the weights of this one"
