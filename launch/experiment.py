"""From an `Experiment` to the objects that it names: strategy, data, compiled model, trainer."""

import dataclasses

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


def build_model(experiment: Experiment, jit_compile: bool | str = False) -> keras.Model:
    """The model of an experiment, compiled, in the current strategy's scope.

    Args:
        experiment: validated.
        jit_compile: for Keras's own `fit`; the trainer of tftpu does not look at it.
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


def _metrics(data: Data) -> tuple[list, list]:
    """The metrics of a data set, and those that look at the weights of its examples."""
    if isinstance(data, sources.Text | sources.Tokens):
        return [], [BitsPerToken(), keras.metrics.SparseCategoricalAccuracy("accuracy")]
    weighted = isinstance(data, sources.Streamed) and data.on_bad_record == "skip"
    weighted |= isinstance(data, sources.Records) and bool(data.weight)
    return ([], [Accuracy()]) if weighted else ([Accuracy()], [])


def build_trainer(experiment: Experiment, workdir: str | None) -> Trainer:
    """Returns the trainer of an experiment, with its model, in the current engine's scope."""
    return Trainer(
        build_model(experiment),
        workdir,
        experiment.train,
        hyperparameters=flat(experiment),
        sample=lambda trainer: sample.of(experiment, trainer),
    )


def flat(experiment: Experiment) -> dict:
    """The fields of an experiment by their path, "optimizer.name", as far as they are set."""
    groups = dataclasses.asdict(experiment)
    return {
        f"{group}.{field}": value
        for group, fields in groups.items()
        for field, value in fields.items()
        if value is not None and value != ""
    }


def initialise(experiment: Experiment, trainer: Trainer) -> str:
    """Gives a run that starts the weights of `model.init_from`; a run that goes on has its own.

    Returns:
        What was loaded, in a sentence; "" if nothing was.

    Raises:
        UserError: the weights are not for this model. A head of another shape is left as it is.
    """
    path = experiment.model.init_from
    if not path or trainer.has_checkpoint():
        return ""
    return f"Weights from {path}: {models.load_weights(trainer.model, path, replace_head=True)}."


def training_data(experiment: Experiment):
    """The training pipeline of an experiment."""
    return input_pipelines.training(experiment.data, experiment.train.seed)
