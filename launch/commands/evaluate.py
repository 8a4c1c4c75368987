"""Evaluates the best checkpoint of a run on the complete evaluation split.

A run that a script made has no config.json: --config then names a config of the same model and
data.

    tftpu evaluate --workdir=runs/digits_resnet
"""

import dataclasses

from tftpu.errors import UserError
from tftpu.launch import finished
from tftpu.launch.options import DeviceOptions, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions, finished.RunOf):
    """The run to evaluate, and the devices."""

    workdir: str = required("DIR", "folder of the run, such as runs/digits_resnet")


def run(options: Options) -> None:
    """Prints loss and metrics of the best checkpoint, or of the newest if none is best."""
    options.split_cpu(options.config)
    experiment = finished.experiment_of(options.workdir, options)
    options.set_cluster(experiment.cluster)
    experiment.cluster.validate()
    trainer, step, evaluation = finished.restored(experiment, options.workdir)
    if evaluation is None:
        raise UserError(
            f"{type(experiment.data).__name__}.evaluation() returns None: the data of the run in "
            f"{options.workdir!r} have no evaluation split."
        )
    results = trainer.evaluate(evaluation)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"step {step}  {numbers}")
