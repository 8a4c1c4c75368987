"""Exports the best checkpoint of a run for programs without tftpu, and verifies the export.

An image classifier takes batches of uint8 pixels, and returns scores, classes and class names.
The format's own runtime runs the export, which is discarded if its outputs differ from the model's.

    tftpu export runs/digits_resnet --output=model.onnx
"""

import dataclasses
import functools
import os
import re
import shlex
from typing import TYPE_CHECKING, Any

from tftpu.amounts import format_size
from tftpu.config import DataConfig, Experiment
from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.input_pipelines.sources import Images, StreamedImages
from tftpu.launch.output import reporting
from tftpu.launch.run import finished
from tftpu.launch.run.serving import build_serving, resolve_inputs
from tftpu.launch.settings import own_code
from tftpu.launch.settings.options import flag, required
from tftpu.models.keras_hub.config import KerasHub
from tftpu.models.sizes import GPT, Llama
from tftpu.runtime.notes import without_notes

if TYPE_CHECKING:
    from tftpu.inference.exporting.serving import Serving
    from tftpu.training.trainer import Trainer

_ENDINGS = {
    "onnx": ".onnx",
    "litert": ".tflite",
    "keras": ".keras",
    "saved_model": "",
    "preset": "",  # a preset is a folder
}
_WHOLE = ("keras", "preset")  # formats of the Keras model itself, with all of its inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.FinishedRunOptions):
    """The run to export, and the format and the path of the export."""

    workdir: str = required("RUN", "folder of the run, local or gs://", word=True)
    output: str = required(
        "PATH", "place of the export, local or gs://: a file, or a new folder", aliases=("to",)
    )
    format: str | None = flag(
        None,
        "saved_model, onnx, litert, keras, or preset for KerasHub's models",
        metavar="NAME",
        shown="by the ending of --output",
    )
    quantize: str | None = flag(None, "int8 or int4 for the weights", metavar="NAME")
    inputs: str | None = flag(
        None,
        "inputs of a language model's export: tokens, and any of segments, positions, types",
        metavar="NAMES",
        shown="tokens, and the other inputs in the run's data",
    )


def run(options: Options) -> None:
    """Writes the export after comparing its outputs with those of the model."""
    form = _choose_format(options)
    _check_bits(options, form)
    named = None if options.inputs is None else _parse_names(options.inputs, form)
    finished.check_unused(options.output, _ENDINGS[form])
    finished.check_exists(options.workdir)
    with reporting(f"Loading {options.workdir}"):
        experiment = finished.load_experiment(options.workdir, options)
        if form == "preset" and not isinstance(experiment.model, KerasHub):
            raise UserError(
                f"--format=preset writes models of KerasHub, and the model of {options.workdir!r} "
                f"is {type(experiment.model).__name__}: use saved_model, onnx, litert or keras."
            )
        # Exports need the TensorFlow engine, which also restores the checkpoints of the JAX
        # engine.
        experiment.cluster.engine, experiment.cluster.tpu = "tensorflow", "none"
        experiment.train.precision = "float32"
        trainer, step, _ = finished.restore_without_data(experiment, options.workdir)
    from tftpu.inference.exporting import export

    if form in _WHOLE:
        serving = _as_keras(trainer, experiment, form)
    else:
        labels = form != "litert"
        serving = build_serving(trainer, experiment, options.quantize, inputs=named, labels=labels)
    write = {
        "saved_model": export.saved_model,
        "onnx": functools.partial(
            export.onnx, about={"step": step, "classes": serving.class_names}
        ),
        "litert": functools.partial(export.litert, about={"step": step}),
        "keras": export.keras_file,
        "preset": export.preset,
    }
    # If TensorFlow Lite's converter fails, it also prints the error with the whole graph.
    hidden = without_notes((b"",)) if form == "litert" else without_notes()
    with reporting(f"Exporting step {step:,} and comparing its outputs"), hidden:
        found = write[form](serving, options.output)
    inputs = ", ".join(f"{i.name} {i.dtype} {list(i.shape)}" for i in serving.inputs)
    print(f"step {step}: {options.output}, {format_size(found.bytes)}")
    print(f"  inputs   {inputs}, any batch")
    takes_pixels = [i.dtype for i in serving.inputs] == ["uint8"]
    if form == "saved_model" and serving.of_files is not None:
        print("  files    JPEG and PNG of any size, as image_bytes of the signature serving_bytes")
        print("           (in TensorFlow Serving; in `tftpu serve`, only of the input's size)")
    elif isinstance(experiment.data, Images | StreamedImages) and takes_pixels:
        print(f"  crop     {_describe_crop(experiment.data)}")
    print(f"  outputs  {', '.join(serving.output_specs())}")
    compared = f"the {options.quantize} model" if options.quantize else "the model"
    print(f"  largest difference from {compared} {found.difference:.1e} of the largest output")
    if form == "preset":
        kind = type(serving.model).__name__
        print(f"  read by  keras_hub.models.{kind}.from_preset({options.output!r})")
        return
    if form == "keras":
        print(f"  read by  {_describe_reading(serving, options.output)}")
    if form in ("onnx", "saved_model"):
        print(f"  served   tftpu serve {shlex.quote(options.output)}")
    if isinstance(experiment.model, GPT | Llama) or hasattr(trainer.model, "generate_step"):
        print(f"  texts    are written by the run: tftpu serve {_quote_run(options)}")


def _quote_run(options: Options) -> str:
    """Returns the arguments with which another command loads the run, quoted for a shell."""
    config = [f"--config={options.config}"] if options.config else []
    return shlex.join([options.workdir, *config, *options.overrides])


def _describe_crop(data: Images | StreamedImages) -> str:
    """Describes how a caller has to crop an image so that it is prepared as in evaluation."""
    share = data.augment.central_side if isinstance(data, StreamedImages) else 1.0
    mode = ', mode="L"' if data.channels == 1 else ""
    return (
        f"by the caller: read_image(path, size={data.image_size}, share={share}{mode}), "
        "in docs/guides/exporting.md#pictures-of-any-size"
    )


def _choose_format(options: Options) -> str:
    """Returns the export's format; raises `UserError` if it does not fit the ending of --output."""
    to = options.output.rstrip("/")
    by_ending = next(name for name, ending in _ENDINGS.items() if to.endswith(ending))
    form = options.format or by_ending
    if form not in _ENDINGS:
        raise UserError(f"There is no format {form!r}.{did_you_mean(form, _ENDINGS)}")
    ending = os.path.splitext(to)[1]
    looks_like_a_file = re.fullmatch(r"\.[a-z][a-z0-9]{0,10}", ending, re.IGNORECASE)
    if options.format is None and form == "saved_model" and looks_like_a_file:
        known = ", ".join(filter(None, _ENDINGS.values()))
        near = find_nearest(ending, filter(None, _ENDINGS.values()))
        raise UserError(
            f"--output={options.output} has the ending {ending}, which no format has: use {known}; "
            "or no ending for the folder of a SavedModel, or --format=saved_model for a folder of "
            f"this name.{f' Did you mean {near!r}?' if near else ''}"
        )
    if _ENDINGS[form] != _ENDINGS[by_ending]:
        ending = (
            f"ends in {_ENDINGS[form]}" if _ENDINGS[form] else "is a folder with no such ending"
        )
        raise UserError(
            f"--output={options.output} is wrong: an export with --format={form} {ending}."
        )
    return form


def _check_bits(options: Options, form: str) -> None:
    if options.quantize is None:
        return
    if options.quantize not in ("int8", "int4"):
        raise UserError(f"--quantize={options.quantize}: give int8 or int4.")
    if form in _WHOLE:
        raise UserError(
            f"--format={form} writes the weights of the run unchanged. With --quantize, use "
            "another format; or read the export and call Keras's model.quantize()."
        )
    if form == "litert" and options.quantize == "int4":
        raise UserError(
            "--format=litert has only one scale for each channel, which is too few for 4 bits. "
            "Use saved_model or onnx with --quantize=int4, or use --quantize=int8."
        )


def _parse_names(listed: str, form: str) -> list[str]:
    """Returns the names in the value of `--inputs`, after checking that the format takes them."""
    if form in _WHOLE:
        raise UserError(
            f"--format={form} writes the model itself, which has all of its inputs: leave out "
            "--inputs, or use another format."
        )
    found = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if not found:
        raise UserError(f"--inputs={listed}: give names, such as --inputs=tokens,segments.")
    return found


def _as_keras(trainer: "Trainer", experiment: Experiment, form: str) -> "Serving":
    """Returns the Keras model to export; unless it has a preprocessor, images are uint8 pixels."""
    from tftpu.inference.exporting.serving import Serving
    from tftpu.launch.run.experiment import build_plain_model

    # The plain model has no loss and no optimizer, whose classes other machines may not have.
    model: Any = build_plain_model(experiment, trainer)
    if form == "preset" and isinstance(experiment.model, KerasHub):
        from tftpu.models.keras_hub import presets

        model.preprocessor = presets.load_preprocessor(experiment.model)
    prepared, given = experiment.prepared_data, None
    if prepared is experiment.data:  # the data have no preprocessor
        with own_code.failures_of_class(experiment.data, "export_inputs"):
            given = experiment.data.export_inputs()
    if given is not None:
        model = _add_pixel_input(model, experiment.data)
        given = dataclasses.replace(given, prepare=lambda pixels: pixels)
    return Serving(model, *resolve_inputs(model, prepared, given))


def _add_pixel_input(model: Any, data: DataConfig) -> Any:
    """Returns a model that takes uint8 pixels: a layer that scales them, then the given model."""
    from tftpu.models.layers import pixels

    scales = type(data).export_inputs in (Images.export_inputs, StreamedImages.export_inputs)
    if not scales or getattr(data, "space_to_depth", False):
        raise UserError(
            "--format=keras writes the model itself, without the code that prepares its images: "
            "choose saved_model or onnx."
        )
    taken: Any = getattr(model, "inputs", None)  # None for a subclassed model
    if not taken or len(taken) > 1:
        raise UserError(
            f"--format=keras puts a layer that scales pixels before the model, but {model.name!r} "
            "is not a functional model with one input: choose saved_model or onnx."
        )
    return model if taken[0].dtype == "uint8" else pixels.standardize_pixels(model)


def _describe_reading(serving: "Serving", path: str) -> str:
    """Returns the lines of Python that read a `.keras` file."""
    from tftpu.inference.exporting.export import list_modules

    # Importing keras_hub registers the classes of all of its modules.
    modules = list_modules(serving.model)
    found = sorted({"keras_hub" if m.startswith("keras_hub.") else m for m in modules})
    own = [name for name in found if name.partition(".")[0] not in ("keras", "tftpu")]
    reader = "tftpu.models" if any(name.startswith("tftpu.") for name in found) else "keras.models"
    imported = ", ".join([reader, *own])
    own = [name for name in own if name != "keras_hub"]
    note = f", with {' and '.join(own)} on Python's path" if own else ""
    # Without compile=False, Keras warns that the file has no loss.
    return f"import {imported}; model = {reader}.load_model({path!r}, compile=False){note}"
