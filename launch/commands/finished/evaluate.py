"""Evaluates the best checkpoint of a run on the complete evaluation split.

A run that a script made has no config.json: --config then names a config of the same model and
data.

    tftpu evaluate runs/digits_resnet
    tftpu evaluate runs/digits_resnet --output=metrics.json
    tftpu evaluate runs/digits_resnet --gate='accuracy>=0.95'
"""

import dataclasses
import json
import math
import os

from tftpu.errors import UserError
from tftpu.launch.output import reporting
from tftpu.launch.run import conditions, finished
from tftpu.launch.settings.options import DeviceOptions, flag, required
from tftpu.storage import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions, finished.FinishedRunOptions):
    """The run to evaluate, and the devices."""

    workdir: str = required("RUN", "folder of the run, such as runs/digits_resnet", word=True)
    output: str | None = flag(
        None, "JSON file to write the metrics to, local or gs://", metavar="FILE"
    )
    base: bool = flag(False, "of a run with adapters: evaluate without them")
    gate: str = flag(
        "", "fail unless the metrics meet this, such as 'accuracy>=0.95' or 'loss<=0.3'"
    )


def run(options: Options) -> None:
    """Prints loss and metrics of the best checkpoint, or of the newest if none is best.

    Raises:
        UserError: there is nothing to evaluate, --output cannot be written, or the metrics do not
            meet the condition of --gate.
    """
    if options.output and (os.path.isdir(options.output) or options.output.endswith("/")):
        raise UserError(f"--output={options.output} is a folder: give the name of a file.")
    finished.check_exists(options.workdir)
    with reporting(f"Loading {options.workdir}"):
        options.split_cpu(options.config)
        experiment = finished.load_experiment(options.workdir, options)
        if options.base:
            finished.check_adapters(experiment, options.workdir)
        options.set_cluster(experiment.cluster)
        experiment.cluster.validate()
        if options.gate:
            conditions.check("--gate", options.gate, experiment)
        trainer, step, evaluation = finished.restore_run(experiment, options.workdir)
    if evaluation is None:
        raise UserError(
            f"{type(experiment.data).__name__}.evaluation() returns None: the data of the run in "
            f"{options.workdir!r} have no evaluation split."
        )
    if options.base:
        trainer = finished.switch_adapters_off(experiment, trainer)
    with reporting(f"Evaluating step {step:,}{' without adapters' if options.base else ''}"):
        results = trainer.evaluate(evaluation, return_dict=True)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"step {step}  {numbers}")
    if options.output:
        _write(options.output, step, results)
    if options.gate:
        reasons = conditions.find_unmet(options.gate, _replace_non_finite(results))
        if reasons:
            raise UserError(f"The gate {options.gate} is not met: {'; '.join(reasons)}.")


def _write(path: str, step: int, results: dict[str, float]) -> None:
    """Writes the step and the metrics as JSON; a value that is not finite becomes null."""
    text = json.dumps({"step": step, "metrics": _replace_non_finite(results)}, indent=2)
    try:
        files.write_whole(path, f"{text}\n".encode())
    except OSError as error:
        raise UserError(f"--output={path} cannot be written: {error}.") from error


def _replace_non_finite(results: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in results.items()}
