"""Builds the compiled model, the data and the trainer that an `Experiment` describes."""

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from tftpu import input_pipelines, models
from tftpu.config import Data, Experiment
from tftpu.input_pipelines import sources
from tftpu.launch import sample
from tftpu.models.layers import pixels
from tftpu.optim import optimizers
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.optim.metrics import Accuracy, BitsPerToken
from tftpu.training.trainer import Trainer

if TYPE_CHECKING:
    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import Training


def build_model(experiment: Experiment, jit_compile: Any = False) -> keras.Model:
    """Builds and compiles the model of an experiment, in the current scope of an engine.

    Args:
        experiment: validated.
        jit_compile: True, False or "auto" for Keras's own `fit`, which annotates it as text only;
            the trainer of tftpu ignores it.
    """
    train = experiment.train
    keras.utils.set_random_seed(train.seed)
    model = models.build(experiment.model)
    if experiment.model.freeze:
        models.freeze(model, experiment.model.freeze)
    if getattr(experiment.data, "image_dtype", None) == "uint8":
        model = pixels.standardised(model)
    optimizer = optimizers.build(
        experiment.optimizer, experiment.data.global_batch_size, train.steps
    )
    metrics, weighted = _metrics(experiment.data)
    model.compile(
        optimizer=optimizer,
        loss=SmoothedCrossentropy(train.label_smoothing),
        metrics=metrics,
        weighted_metrics=weighted,
        jit_compile=jit_compile,
    )
    return model


def build_trainer(experiment: Experiment, workdir: str | None) -> Trainer:
    """Builds the model and the trainer of an experiment, in the current scope of an engine.

    Args:
        experiment: validated.
        workdir: folder of the run, local or `gs://`; None writes nothing.
    """
    return Trainer(
        build_model(experiment),
        workdir,
        experiment.train,
        hyperparameters=hyperparameters(experiment),
        sample=lambda trainer: sample.text(experiment, trainer),
    )


def hyperparameters(experiment: Experiment) -> dict[str, bool | int | float | str]:
    """Returns the fields of an experiment that have a value, by path: "optimizer.name"."""
    found = {
        f"{group}.{field}": value
        for group, fields in dataclasses.asdict(experiment).items()
        for field, value in fields.items()
        if value is not None and value != ""
    }
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in found.items()
    }


def initialise(experiment: Experiment, trainer: Trainer) -> str:
    """Loads the weights of `model.init_from` into a new run; a resumed run keeps its own.

    Returns:
        A message about what was loaded; "" if nothing was.

    Raises:
        UserError: the weights do not fit the model. A head of another shape is left as it is.
    """
    path = experiment.model.init_from
    if not path or trainer.has_checkpoint():
        return ""
    return f"Weights from {path}: {models.load_weights(trainer.model, path, replace_head=True)}."


def training_data(experiment: Experiment) -> "Training | Pipeline":
    """Returns the training pipeline of an experiment."""
    return input_pipelines.training(experiment.data, experiment.train.seed)


def _metrics(data: Data) -> tuple[list[keras.Metric], list[keras.Metric]]:
    """Returns the metrics for a data set: those without and those with weights per example."""
    if isinstance(data, sources.Text | sources.Tokens):
        return [], [BitsPerToken(), keras.metrics.SparseCategoricalAccuracy("accuracy")]
    weighted = isinstance(data, sources.Streamed) and data.on_bad_record == "skip"
    weighted |= isinstance(data, sources.Records) and bool(data.weight)
    return ([], [Accuracy()]) if weighted else ([Accuracy()], [])
