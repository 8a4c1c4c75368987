"""Measures how weights of 8 and 4 bits change the metrics of a run and the size of its model.

The best checkpoint is evaluated on the complete evaluation split; nothing is written. `tftpu export
--quantize` exports such weights.

    tftpu quantize runs/digits_resnet
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.output import reporting
from tftpu.launch.run import finished
from tftpu.launch.settings.options import DeviceOptions, required
from tftpu.runtime.slow import report_activity

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions, finished.FinishedRunOptions):
    """The run to measure, and the devices."""

    workdir: str = required("RUN", "folder of the run, such as runs/digits_resnet", word=True)


def run(options: Options) -> None:
    """Prints a row for each precision of the weights: size, metrics, and changes of the metrics."""
    finished.check_exists(options.workdir)
    with reporting(f"Loading {options.workdir}"):
        options.split_cpu(options.config)
        experiment = finished.load_experiment(options.workdir, options)
        options.set_cluster(experiment.cluster)
        experiment.cluster.validate()
        restored = finished.restore_run(experiment, options.workdir)
    if restored.evaluation is None:
        raise UserError(
            f"The data of the run in {options.workdir!r} have no evaluation split, so there is "
            "nothing to measure on."
        )
    from tftpu.inference import quantizing

    report_activity(f"Evaluating step {restored.step:,} with weights of 32, 8 and 4 bits")
    trainer = _build_plain_trainer(experiment, restored.trainer)
    variables = {v.path: v for v in trainer.model.weights}
    whole = {path: np.asarray(v) for path, v in variables.items()}
    floats = sum(value.size * 4 for value in whole.values())
    before = trainer.evaluate(restored.evaluation, return_dict=True)
    print(f"step {restored.step}")
    print(f"{'weights':8}  {'MiB':>8}  {'ratio':>5}  " + _format_heads(before))
    print(
        f"{'float32':8}  {floats / 2**20:8.2f}  {1:5.2f}  {_format_numbers(before, before)}",
        flush=True,
    )
    for name, bits in quantizing.BITS.items():
        found = quantizing.quantize_weights(trainer.model, bits)
        for path, value in found.items():
            variables[path].assign(value.values)
        results = trainer.evaluate(restored.evaluation, return_dict=True)
        size = sum(q.bytes for q in found.values())
        size += sum(value.size * 4 for path, value in whole.items() if path not in found)
        numbers = _format_numbers(results, before)
        print(f"{name:8}  {size / 2**20:8.2f}  {size / floats:5.2f}  {numbers}", flush=True)
        for path, value in whole.items():
            variables[path].assign(value)


def _build_plain_trainer(experiment: Experiment, trained: "Trainer") -> "Trainer":
    """Returns a trainer of the trained model, with averaged weights and merged adapters."""
    from tftpu import models
    from tftpu.launch.run import experiment as build

    train = dataclasses.replace(experiment.train, ema_momentum=None)
    plain = dataclasses.replace(experiment, model=build.remove_adapters(experiment), train=train)
    with trained.engine.scope():
        trainer = build.build_trainer(finished.set_placeholder_length(plain), None)
    models.assign_merged(trainer.model, trained.model, trained.executor.averaged_weights())
    return trainer


def _format_heads(results: dict[str, float]) -> str:
    return "  ".join(f"{name:>16} {'change':>8}" for name in results)


def _format_numbers(results: dict[str, float], before: dict[str, float]) -> str:
    """Formats each metric, and its relative change from `before`."""
    return "  ".join(
        f"{value:16.4f} {(value - before[name]) / (abs(before[name]) or 1.0):+8.2%}"
        for name, value in results.items()
    )
