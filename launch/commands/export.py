"""Exports the best checkpoint of a run for programs without tftpu, and proves that it is the same.

Images come in as pixels, uint8 of any batch; scores, classes and their names come out. The export
is run by the format's own runtime in a process of its own, and discarded if its outputs differ.

    tftpu export --workdir=runs/digits_resnet --format=onnx --to=digits.onnx
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from tftpu.config import Experiment
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import finished
from tftpu.launch.options import flag, required
from tftpu.launch.startup import without_notes

if TYPE_CHECKING:
    from tftpu.inference.exporting.serving import Serving
    from tftpu.training.trainer import Trainer

_ENDINGS = {"saved_model": "", "onnx": ".onnx", "keras": ".keras"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.RunOf):
    """The run to export, the format and the place."""

    workdir: str = required("DIR", "folder of the run, local or gs://")
    to: str = required("PATH", "place of the export, local or gs://: a file, or a new folder")
    format: str = flag("saved_model", "saved_model, onnx or keras", metavar="NAME")


def run(options: Options) -> None:
    """Writes the export, once its outputs were compared."""
    if options.format not in _ENDINGS:
        hint = did_you_mean(options.format, _ENDINGS)
        raise UserError(f"There is no format {options.format!r}.{hint}")
    ending = _ENDINGS[options.format]
    if not options.to.endswith(ending):
        raise UserError(f"--to={options.to}: a file of --format={options.format} ends in {ending}.")
    experiment = finished.experiment_of(options.workdir, options)
    # TensorFlow's graph is what all formats are made of; a checkpoint is the same on both engines.
    experiment.cluster.engine, experiment.cluster.tpu = "tensorflow", "none"
    experiment.train.precision = "float32"
    trainer, step, _ = finished.restored_without_data(experiment, options.workdir)
    from tftpu.inference.exporting import export

    serving = _serving(trainer, experiment, options.format == "keras")
    onnx = functools.partial(export.onnx, about={"step": step, "classes": serving.class_names})
    write = {"saved_model": export.saved_model, "onnx": onnx, "keras": export.keras_file}
    with without_notes():
        found = write[options.format](serving, options.to)
    inputs = ", ".join(f"{i.name} {i.dtype} {list(i.shape)}" for i in serving.inputs)
    print(f"step {step}: {options.to}, {found.bytes / 2**20:.2f} MiB")
    print(f"  inputs   {inputs}, any batch")
    print(f"  outputs  {', '.join(serving.output_specs())}")
    print(f"  largest difference from the model {found.difference:.1e} of the largest output")


def _serving(trainer: "Trainer", experiment: Experiment, as_keras: bool) -> "Serving":
    """Returns the model with the weights that evaluation uses, and what it takes and returns."""
    from tftpu.inference.exporting.serving import Serving, inputs_of

    model = trainer.model
    averages = trainer.executor.averaged_weights()
    for variable in model.trainable_variables:
        if variable.path in averages:
            variable.assign(averages[variable.path])
    given = experiment.data.export_inputs()
    names = finished.class_names(experiment)
    if as_keras:  # without loss and optimizer, which another program may not know
        from tftpu.launch.experiment import build_layers

        bare = build_layers(experiment)
        bare.set_weights(model.get_weights())
        model = bare
    if as_keras and given is not None:
        model, names = _with_pixels(model, experiment), None
        given = dataclasses.replace(given, prepare=lambda pixels: pixels)
    elif as_keras:
        names = None
    return Serving(model, *inputs_of(model, experiment.data, given), names)


def _with_pixels(model: Any, experiment: Experiment) -> Any:
    """Returns a model that takes pixels, as `export_inputs` of images has them."""
    from tftpu.models.layers import pixels
    from tftpu.models.layers.block_model import BlockModel

    if getattr(experiment.data, "space_to_depth", False) or not isinstance(model, BlockModel):
        raise UserError(
            "--format=keras holds the model itself, and its images are prepared outside of it: "
            "choose saved_model or onnx."
        )
    taken: Any = model.input
    return model if taken.dtype == "uint8" else pixels.standardised(model)
