"""A run as the server of models calls it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.config import DataConfig, Experiment
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Tokens
from tftpu.launch.run import finished, texts
from tftpu.launch.settings import own_code
from tftpu.launch.startup import quieten_xla

if TYPE_CHECKING:
    from tftpu.inference.exporting.inputs import Input
    from tftpu.inference.exporting.serving import Serving
    from tftpu.inference.generate import Writer
    from tftpu.inference.server.served import Served
    from tftpu.inference.server.text import Language
    from tftpu.training.trainer import Trainer


class ServedRun(NamedTuple):
    """A run that answers requests.

    Attributes:
        model: answers with arrays, or with text.
        step: of its checkpoint.
    """

    model: "Served | Language"
    step: int


class LanguageOptions(NamedTuple):
    """Options that only language models have.

    Attributes:
        tokenizer: see `texts.choose_codec`.
        stop: see `texts.find_stop_token`.
        tokens: the most that a request may ask for; the server limits them.
    """

    tokenizer: str | None
    stop: str | None
    tokens: int | None


def restore_served_run(
    workdir: str, options: finished.FinishedRunOptions, for_texts: LanguageOptions
) -> ServedRun:
    """Restores the best checkpoint of a run to answer requests on this machine's CPU or GPU.

    Args:
        workdir: folder of the run.
        options: as for `finished.load_experiment`.
        for_texts: which the run has to be for, where any of them is given.

    Raises:
        UserError: there is no such run, or nothing says what its tokens mean.
    """
    experiment = finished.load_experiment(workdir, options)
    experiment.cluster.engine, experiment.cluster.tpu = "tensorflow", "none"
    experiment.train.precision = "float32"
    trainer, step, _ = finished.restore_without_data(experiment, workdir)
    refused = _explain_refusal(trainer, experiment)
    if refused is None:
        return ServedRun(_build_language(trainer, experiment, for_texts), step)
    given = [f"--{name}" for name, value in for_texts._asdict().items() if value is not None]
    if given:
        raise UserError(
            f"{given[0]} is for language models, and the run in {workdir!r} is of none: {refused}"
        )
    from tftpu.inference.server import served

    serving = build_serving(trainer, experiment)
    outputs = tuple(serving.output_specs())
    return ServedRun(served.wrap_tensorflow(serving.inputs, outputs, serving.outputs), step)


def build_serving(
    trainer: "Trainer",
    experiment: Experiment,
    quantize: str | None = None,
    *,
    inputs: Sequence[str] | None = None,
    labels: bool = True,
) -> "Serving":
    """Returns the model with the weights that evaluation uses, and what it takes and returns.

    Args:
        trainer: restored for evaluation.
        experiment: of the run.
        quantize: "int8" or "int4" for the weights; None: float32.
        inputs: of a language model, such as "tokens" and "segments"; None: see `resolve_inputs`.
        labels: whether it returns the names of classes.
    """
    from tftpu.inference import quantizing
    from tftpu.inference.exporting.serving import Serving
    from tftpu.launch.run.experiment import build_plain_model

    model = build_plain_model(experiment, trainer)  # without loss and optimizer
    with own_code.failures_of_class(experiment.data, "export_inputs"):
        given = experiment.data.export_inputs()
    taken = resolve_inputs(model, experiment.data, given, inputs)
    names = finished.read_class_names(experiment)
    bits = quantizing.BITS[quantize] if quantize else None
    quantized = quantizing.quantize_weights(model, bits) if bits else {}
    return Serving(model, *taken, names, quantized, labels=labels)


def resolve_inputs(
    model: Any,
    data: DataConfig,
    given: ExportInputs | None,
    inputs: Sequence[str] | None = None,
) -> tuple["list[Input]", Callable[..., Any]]:
    """Returns what a run's model takes where it is exported, and what makes its features of that.

    Args:
        model: built.
        data: that it was trained on.
        given: as `data.export_inputs` returns it.
        inputs: of a language model; None: the features that it was trained on, but those that only
            rows packed with several documents need.
    """
    from tftpu.inference.exporting.serving import TOKENS, build_inputs

    if given is None and not hasattr(model, "input"):  # a subclass of keras.Model
        given = _describe_as_read(data)
    if given is None and inputs is None and isinstance(data, Tokens):
        inputs = (TOKENS,)
    return build_inputs(model, _describe_features(data), given, inputs)


def _describe_as_read(data: DataConfig) -> ExportInputs:
    """Returns the features of a data set as they are, for a model that does not say its inputs."""
    import keras

    features = _describe_features(data)
    flat = keras.tree.flatten(features)
    named = isinstance(features, Mapping)
    names = sorted(features) if named else [f"input_{n}" for n in range(len(flat))]
    shapes = {name: tuple(spec.shape[1:]) for name, spec in zip(names, flat)}
    dtypes = {name: spec.dtype.name for name, spec in zip(names, flat)}

    def prepare(*values: Any) -> Any:
        return keras.tree.pack_sequence_as(features, list(values))

    return ExportInputs(shapes, dtypes, prepare)


def _describe_features(data: DataConfig) -> Any:
    """Returns the specs of a batch's features."""
    from tftpu import input_pipelines

    with own_code.failures_of_class(data, "batch_spec"):
        spec = input_pipelines.batch_spec(data, data.global_batch_size)
    return spec[0] if isinstance(spec, tuple) else spec


def _explain_refusal(trainer: "Trainer", experiment: Experiment) -> str | None:
    """Returns why a run is of no language model; None if it is of one."""
    import keras

    if not all(
        spec.dtype.is_integer for spec in keras.tree.flatten(_describe_features(experiment.data))
    ):
        return "its features are not tokens."
    quieten_xla()
    try:
        _build_writer(trainer, experiment, None)
    except UserError as error:
        return str(error)
    return None


def _build_writer(trainer: "Trainer", experiment: Experiment, stop: int | None) -> "Writer":
    from tftpu.inference.generate import Writer

    context = getattr(experiment.data, "context", None)
    return Writer(trainer.model, stop, context, trainer.executor.compiled)


def _build_language(
    trainer: "Trainer", experiment: Experiment, for_texts: LanguageOptions
) -> "Language":
    from tftpu.inference.server import device
    from tftpu.inference.server.text import Language

    codec = texts.choose_codec(experiment.data, for_texts.tokenizer)
    stop = texts.find_stop_token(experiment.data, codec, for_texts.stop)
    writer = _build_writer(trainer, experiment, stop)
    return Language(
        writer, codec.encode, codec.build_decoder, codec.size, device.find_tensorflow_device()
    )
