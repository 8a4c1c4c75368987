"""Writes the weights of a run's best checkpoint to one file, without the optimizer.

tftpu export-weights --workdir=runs/digits_resnet --to=digits.safetensors
"""

import dataclasses

from tftpu.errors import UserError
from tftpu.launch import finished
from tftpu.launch.options import required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.RunOf):
    """The run to export, and the file to write."""

    workdir: str = required("DIR", "folder of the run, local or gs://")
    to: str = required("FILE", "file to write, .weights.h5 or .safetensors")


def run(options: Options) -> None:
    """Writes the weights of the best checkpoint, or of the newest if none is best."""
    if not options.to.endswith((".weights.h5", ".safetensors")):
        raise UserError(
            f"--to={options.to}: the file to write ends in .weights.h5 or .safetensors."
        )
    experiment = finished.experiment_of(options.workdir, options)
    trainer, step, _ = finished.restored_without_data(experiment, options.workdir)
    trainer.export_weights(options.to)
    print(f"step {step}: {trainer.model.count_params():,} weights in {options.to}")
