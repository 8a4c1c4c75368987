"""Writes the weights of a run's best checkpoint to one file, without the optimizer.

tftpu export-weights runs/digits_resnet --output=model.safetensors
tftpu export-weights runs/tuned --adapters --output=adapters
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.output import reporting
from tftpu.launch.run import finished
from tftpu.launch.settings.options import flag, required
from tftpu.models.keras_hub.config import KerasHub

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer

_ENDINGS = (".weights.h5", ".safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.FinishedRunOptions):
    """The run to export, and the file to write."""

    workdir: str = required("RUN", "folder of the run, local or gs://", word=True)
    output: str = required(
        "FILE",
        "file to write, .weights.h5 or .safetensors; with --adapters a folder",
        aliases=("to",),
    )
    merge: bool = flag(False, "of a run with adapters: add them to the base weights")
    adapters: bool = flag(False, "of a run with adapters: write only these, in PEFT's format")


def run(options: Options) -> None:
    """Writes the weights of the best checkpoint, or of the newest if none is best."""
    _check_place(options)
    endings = ("",) if options.adapters else _ENDINGS
    finished.check_unused(options.output, next(e for e in endings if options.output.endswith(e)))
    finished.check_exists(options.workdir)
    with reporting(f"Loading {options.workdir}"):
        experiment = finished.load_experiment(options.workdir, options)
        _check(options, experiment.model.lora)
        trainer, step, _ = finished.restore_without_data(experiment, options.workdir)
    if not experiment.model.lora:
        trainer.export_weights(options.output)
        print(f"step {step}: {trainer.model.count_params():,} weights in {options.output}")
        return
    if options.adapters:
        try:
            with reporting("Writing the adapters"):
                count = _write_adapters(experiment, trainer, options.output)
        except OSError as error:
            raise UserError(
                f"--output={options.output} cannot be written ({error.strerror or error}): "
                "--adapters writes a folder with two files, so name a new folder."
            ) from error
        trained = sum(math.prod(weight.shape) for weight in trainer.model.trainable_weights)
        text = f"step {step}: adapters of {count:,} weights for PEFT in {options.output}"
        if count != trained:
            text += f" ({trained:,} are trained; PEFT's factors have other shapes)"
        print(text)
        print(
            f"  read by  peft.PeftModel.from_pretrained(model, {options.output!r}), where model is "
            "the base model of Transformers"
        )
        return
    from tftpu.inference import export
    from tftpu.launch.run.experiment import build_plain_model

    with reporting("Writing the weights"):
        plain = build_plain_model(experiment, trainer)
        export.write_weights(plain, {}, options.output)
    print(f"step {step}: {plain.count_params():,} weights in {options.output}, adapters merged")
    if isinstance(experiment.model, KerasHub) and options.output.endswith(".h5"):
        print(f"  read by  model.load_weights({options.output!r}) of the preset's model")
    elif isinstance(experiment.model, KerasHub):  # .safetensors, whose keys Keras cannot read
        print(
            f"  read by  safetensors.numpy.load_file({options.output!r}); Keras reads .weights.h5"
        )


def _write_adapters(experiment: Experiment, trainer: "Trainer", folder: str) -> int:
    averages, config = trainer.executor.averaged_weights(), experiment.model
    if not isinstance(config, KerasHub):
        from tftpu.models.weights import peft

        return peft.save_adapters(trainer.model, folder, replaced=averages)
    from tftpu.launch.run import experiment as build
    from tftpu.models.keras_hub import peft as of_tasks

    plain = build.build_layers(
        dataclasses.replace(experiment, model=build.remove_adapters(experiment))
    )
    base = config.preset.removeprefix("hf://") if config.preset.startswith("hf://") else ""
    return of_tasks.save_adapters(trainer.model, plain, folder, base, averages)


def _check(options: Options, rank: int) -> None:
    """Raises `UserError` for options that do not fit the run."""
    chosen = options.merge or options.adapters
    if not rank and chosen:
        raise UserError(
            f"--{'merge' if options.merge else 'adapters'}: the run in {options.workdir!r} has no "
            "adapters (model.lora is 0). Leave the flag out to write the weights."
        )
    if rank and not chosen:
        raise UserError(
            f"The run in {options.workdir!r} trained adapters: give --merge to write all weights "
            "into one file, or --adapters to write a folder that PEFT reads."
        )


def _check_place(options: Options) -> None:
    """Raises `UserError` for a path that does not fit the flags."""
    if options.merge and options.adapters:
        raise UserError(
            "--merge and --adapters exclude each other: give --merge to write all weights into "
            "one file, or --adapters to write a folder that PEFT reads."
        )
    if not options.adapters and not options.output.endswith(_ENDINGS):
        raise UserError(
            f"--output={options.output} must end in .weights.h5 or .safetensors; with --adapters, "
            "for a run that trained some, it is a folder that PEFT reads."
        )
    if options.adapters and options.output.endswith((".h5", ".safetensors")):
        raise UserError(
            f"--output={options.output} must be a folder, because --adapters writes two files."
        )
