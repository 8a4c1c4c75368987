"""Prepares a run for the model server and for exports."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.config import DataConfig, Experiment
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Tokens
from tftpu.launch.run import finished, texts
from tftpu.launch.settings import own_code

if TYPE_CHECKING:
    from tftpu.inference.exporting.inputs import Input
    from tftpu.inference.exporting.serving import Serving
    from tftpu.inference.server.served import Arrays, Served
    from tftpu.inference.server.text import Language
    from tftpu.inference.writer import Writer
    from tftpu.training.trainer import Trainer

_log = logging.getLogger(__name__)


class ServedRun(NamedTuple):
    """A run that answers requests.

    Attributes:
        model: the model, which answers with arrays or with text.
        step: the training step of the checkpoint.
        prompt: an example prompt for a language model; "" for other models.
    """

    model: "Served | Language"
    step: int
    prompt: str = ""


class LanguageOptions(NamedTuple):
    """Options that only language models have.

    Attributes:
        tokenizer: see `texts.choose_codec`.
        stop: see `texts.find_stop_tokens`.
        tokens: the largest number of tokens that a request may ask for.
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
        options: see `finished.load_experiment`.
        for_texts: options that only language models have; each is None if it is not given.

    Raises:
        UserError: there is no such run, the meaning of its tokens is unknown, or `for_texts` is
            given although the run did not train a language model.
    """
    experiment = finished.load_experiment(workdir, options)
    experiment.cluster.engine, experiment.cluster.tpu = "tensorflow", "none"
    experiment.train.precision = "float32"
    trainer, step, _ = finished.restore_without_data(experiment, workdir)
    refused = _explain_refusal(trainer, experiment)
    if refused is None:
        from tftpu.launch.run import sample

        prompt = sample.find_prompt(experiment.data)
        return ServedRun(_build_language(trainer, experiment, for_texts), step, prompt)
    given = [f"--{name}" for name, value in for_texts._asdict().items() if value is not None]
    if given:
        raise UserError(
            f"{given[0]} works only with language models, and the run in {workdir!r} did not "
            f"train one: {refused}"
        )
    from tftpu.inference.server import served

    serving = build_serving(trainer, experiment)
    outputs = tuple(serving.output_specs())
    model = served.wrap_tensorflow(serving.inputs, outputs, serving.outputs)
    encode = _find_encoder(experiment, serving.inputs)
    return ServedRun(dataclasses.replace(model, encode=encode), step)


def _find_encoder(
    experiment: Experiment, inputs: "Sequence[Input]"
) -> "Callable[[Sequence[str]], Arrays] | None":
    """Returns a function that encodes texts as `tftpu predict --input=sentence:TEXT` does.

    Returns None if the run's data class encodes no texts. A user's class is tried with a text; if
    it fails, the reason is printed, unless the class took the text for the name of a missing file.
    """
    import keras
    import numpy as np

    from tftpu import input_pipelines
    from tftpu.inference.server import payloads
    from tftpu.inference.server.served import Refused, extract_first_line

    data, name = experiment.data, type(experiment.data).__name__
    unknown = not data.address_kinds and type(data).prediction is not DataConfig.prediction
    if payloads.SENTENCE not in data.address_kinds and not unknown:
        return None
    own = not own_code.is_of_tftpu(type(data))

    def encode_text(text: str) -> "Arrays":
        records = input_pipelines.prediction(prepared, f"{payloads.SENTENCE}:{text}")
        if records.count != 1:
            raise UserError(f"{name}.prediction returns {records.count} rows for one text.")
        [features] = records.features([range(records.count)]).as_numpy_iterator()
        if isinstance(features, Mapping):
            parts = [features[i.name] for i in inputs if i.name in features]
        else:
            parts = keras.tree.flatten(features)
        arrays = {i.name: part.astype(i.dtype) for i, part in zip(inputs, parts)}
        if len(parts) != len(inputs) or any(arrays[i.name].shape != (1, *i.shape) for i in inputs):
            raise UserError("The features of a text do not match the inputs of the model.")
        return arrays

    def encode(texts: Sequence[str]) -> "Arrays":
        try:
            encoded = [encode_text(text) for text in texts]
        except UserError as error:
            raise Refused(str(error)) from error
        except Exception as error:
            if not own:
                raise
            _log.warning("A text cannot be read.", exc_info=error)
            kind, why = type(error).__name__, extract_first_line(error)
            raise Refused(f"{name}.prediction cannot read this text: {kind}: {why}") from error
        return {i.name: np.concatenate([row[i.name] for row in encoded]) for i in inputs}

    try:
        prepared = experiment.model.prepare_data(dataclasses.replace(data, global_batch_size=1))
        encode_text("a")
    except Exception as error:  # a class may do anything with an address that it does not know
        if not own:
            raise
        address = f"{payloads.SENTENCE}:a"
        if not (isinstance(error, FileNotFoundError | UserError) and address in str(error)):
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            why = f"{name} cannot read {address!r}: {kind}{extract_first_line(error)}"
            print(f"tftpu: requests with texts are not accepted: {why}", file=sys.stderr)
        return None
    return encode


def build_serving(
    trainer: "Trainer",
    experiment: Experiment,
    quantize: str | None = None,
    *,
    inputs: Sequence[str] | None = None,
    labels: bool = True,
) -> "Serving":
    """Returns the model with the weights that evaluation uses, and its inputs and outputs.

    Args:
        trainer: a trainer that was restored for evaluation.
        experiment: the experiment of the run.
        quantize: "int8" or "int4" for the weights; None keeps float32.
        inputs: names of a language model's inputs, such as "tokens" and "segments"; for None,
            see `resolve_inputs`.
        labels: whether the model also returns the names of classes.
    """
    from tftpu.inference import quantizing
    from tftpu.inference.exporting.serving import Serving
    from tftpu.launch.run.experiment import build_plain_model

    model = build_plain_model(experiment, trainer)  # the model has no loss and no optimizer
    with own_code.failures_of_class(experiment.data, "export_inputs"):
        given = experiment.prepared_data.export_inputs()
    taken = resolve_inputs(model, experiment.prepared_data, given, inputs)
    names = finished.read_class_names(experiment)
    bits = quantizing.BITS[quantize] if quantize else None
    quantized = quantizing.quantize_weights(model, bits) if bits else {}
    decode = given.decode if given is not None else None
    return Serving(model, *taken, names, quantized, labels=labels, decode=decode)


def resolve_inputs(
    model: Any,
    data: DataConfig,
    given: ExportInputs | None,
    inputs: Sequence[str] | None = None,
) -> tuple["list[Input]", Callable[..., Any]]:
    """Returns an export's inputs, and the function that turns them into the model's features.

    Args:
        model: the built model.
        data: the data that it was trained on.
        given: the result of `data.export_inputs`.
        inputs: names of a language model's inputs; None takes the features that it was trained on,
            except those that only rows with several packed documents need.
    """
    from tftpu.inference.exporting.serving import TOKENS, build_inputs

    # A subclass of keras.Model may declare no inputs.
    if given is None and not hasattr(model, "input"):
        given = _describe_as_read(data)
    if given is None and inputs is None and isinstance(data, Tokens):
        inputs = (TOKENS,)
    return build_inputs(model, _describe_features(data), given, inputs)


def _describe_as_read(data: DataConfig) -> ExportInputs:
    """Returns a data set's features as inputs, for a model that declares no inputs."""
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
    """Returns why a run did not train a language model; None if it did."""
    import keras

    if not hasattr(trainer.model, "generate_step") and not all(
        spec.dtype.is_integer
        for spec in keras.tree.flatten(_describe_features(experiment.prepared_data))
    ):
        return "its features are not tokens."
    try:
        _build_writer(trainer, experiment)
    except UserError as error:
        return str(error)
    return None


def _build_writer(trainer: "Trainer", experiment: Experiment, stop: Sequence[int] = ()) -> "Writer":
    from tftpu.inference.generate import open_writer

    context = getattr(experiment.data, "context", None)
    return open_writer(trainer.model, stop, context, trainer.executor.compiled)


def _build_language(
    trainer: "Trainer", experiment: Experiment, for_texts: LanguageOptions
) -> "Language":
    from tftpu.inference.server import device
    from tftpu.inference.server.text import Language

    codec = texts.choose_codec(experiment, for_texts.tokenizer)
    stop = texts.find_stop_tokens(experiment.data, codec, for_texts.stop, trainer.model)
    writer = _build_writer(trainer, experiment, stop)
    return Language(
        writer,
        codec.encode,
        codec.build_decoder,
        codec.size,
        writer.programs.decoding.context,
        device.find_tensorflow_device(),
    )
