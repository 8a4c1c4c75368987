"""Evaluates the best checkpoint of a run on the complete evaluation split.

tftpu evaluate --workdir=runs/digits_resnet
"""

import dataclasses

from tftpu.launch import finished
from tftpu.launch.options import DeviceOptions, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    """The run to evaluate, and the devices."""

    workdir: str = required("DIR", "folder of the run, such as runs/digits_resnet")


def run(options: Options) -> None:
    """Prints loss and metrics of the best checkpoint, or of the newest if none is best."""
    experiment = finished.experiment_of(options.workdir)
    options.set_cluster(experiment.cluster)
    experiment.cluster.validate()
    trainer, step, evaluation = finished.restored(experiment, options.workdir)
    results = trainer.evaluate(evaluation)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"step {step}  {numbers}")
