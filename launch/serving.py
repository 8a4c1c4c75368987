"""A run as the server of models calls it."""

from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch import finished, texts
from tftpu.launch.startup import quieten_xla

if TYPE_CHECKING:
    from tftpu.inference.exporting.serving import Serving
    from tftpu.inference.server.served import Served
    from tftpu.inference.server.text import Language
    from tftpu.training.trainer import Trainer


class Answering(NamedTuple):
    """A run that answers requests.

    Attributes:
        model: answers with arrays, or with text.
        step: of its checkpoint.
    """

    model: "Served | Language"
    step: int


def answering(
    workdir: str, options: finished.RunOf, tokenizer: str | None, stop: str | None
) -> Answering:
    """Restores the best checkpoint of a run to answer requests on this machine's CPU or GPU.

    Args:
        workdir: folder of the run.
        options: as for `finished.experiment_of`.
        tokenizer: of a language model; see `texts.codec_of`.
        stop: likewise; see `texts.stop_of`.

    Raises:
        UserError: there is no such run, or nothing says what its tokens mean.
    """
    experiment = finished.experiment_of(workdir, options)
    experiment.cluster.engine, experiment.cluster.tpu = "tensorflow", "none"
    experiment.train.precision = "float32"
    trainer, step, _ = finished.restored_without_data(experiment, workdir)
    if _writes(trainer.model):
        quieten_xla()
        return Answering(_language(trainer, experiment, tokenizer, stop), step)
    given = [f"--{n}" for n, v in (("tokenizer", tokenizer), ("stop", stop)) if v]
    if given:
        raise UserError(
            f"{given[0]} is for language models, and the run in {workdir!r} is of none."
        )
    from tftpu.inference.server.served import Served

    serving = serving_of(trainer, experiment)
    return Answering(Served(serving.inputs, tuple(serving.output_specs()), serving.outputs), step)


def serving_of(
    trainer: "Trainer",
    experiment: Experiment,
    quantize: str | None = None,
    *,
    labels: bool = True,
) -> "Serving":
    """Returns the model with the weights that evaluation uses, and what it takes and returns.

    Args:
        trainer: restored for evaluation.
        experiment: of the run.
        quantize: "int8" or "int4" for the weights; None: float32.
        labels: whether it returns the names of classes.
    """
    from tftpu.inference import quantizing
    from tftpu.inference.exporting.serving import Serving, inputs_of
    from tftpu.launch.experiment import plain_model

    model = plain_model(experiment, trainer)  # without loss and optimizer
    taken = inputs_of(model, experiment.data, experiment.data.export_inputs())
    names = finished.class_names(experiment)
    bits = quantizing.BITS[quantize] if quantize else None
    quantized = quantizing.quantized_weights(model, bits) if bits else {}
    return Serving(model, *taken, names, quantized, labels=labels)


def _writes(model: Any) -> bool:
    """Returns whether a model predicts tokens of tokens."""
    shape = getattr(model, "output_shape", None)
    takes_tokens = isinstance(model.input, dict) and "tokens" in model.input
    return takes_tokens and isinstance(shape, tuple) and len(shape) == 3


def _language(
    trainer: "Trainer", experiment: Experiment, tokenizer: str | None, stop: str | None
) -> "Language":
    from tftpu.inference.generate import Writer
    from tftpu.inference.server.text import Language

    codec = texts.codec_of(experiment.data, tokenizer)
    end = texts.stop_of(experiment.data, codec, stop)
    context = getattr(experiment.data, "context", None)
    writer = Writer(trainer.model, end, context, trainer.executor.compiled)
    return Language(writer, codec.encode, codec.decoder, codec.size)
