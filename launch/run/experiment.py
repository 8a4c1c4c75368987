"""Builds the compiled model, the data and the trainer that an `Experiment` describes."""

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from tftpu import input_pipelines, models
from tftpu.config import DataConfig, Experiment, Function, KerasObject, ModelConfig
from tftpu.engines import selection
from tftpu.engines.engine import Engine
from tftpu.errors import UserError
from tftpu.launch.run import sample
from tftpu.launch.settings import keras_objects
from tftpu.launch.settings.own_code import failures_of_class
from tftpu.models import sizes
from tftpu.models.layers import pixels
from tftpu.optim import optimizers
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.optim.metrics import Accuracy, BitsPerToken
from tftpu.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tensorflow as tf

    from tftpu.engines.objectives.objective import Objective
    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import ArrayPipeline


def connect(experiment: Experiment) -> Engine:
    """Returns the engine for the devices of an experiment."""
    cluster = experiment.cluster
    return selection.connect(
        cluster.tpu,
        cluster.virtual_devices,
        cluster.engine,
        cluster.mesh,
        cluster.compiler_options,
        cluster.host_timeout,
    )


def build_model(experiment: Experiment, jit_compile: Any = False) -> keras.Model:
    """Builds and compiles the model of an experiment, in the current scope of an engine.

    Args:
        experiment: a validated experiment with a length in steps.
        jit_compile: True, False or "auto", for Keras's own `fit`; tftpu's trainer ignores it.
    """
    model = build_layers(experiment)
    if has_objectives(experiment):
        return model  # it trains with its own objectives, and needs no compiled loss
    if model.compiled and experiment.loss is None:  # a KerasHub task compiles itself with a loss
        given = {
            name: keras_objects.build_objects(getattr(experiment, name), name)
            for name in ("metrics", "weighted_metrics")
            if getattr(experiment, name)
        }
        model.compile(optimizer=build_optimizer(experiment), jit_compile=jit_compile, **given)
        return model
    loss, metrics, weighted = _build_loss_and_metrics(experiment)
    model.compile(
        optimizer=build_optimizer(experiment),
        loss=loss,
        metrics=metrics,
        weighted_metrics=weighted,
        jit_compile=jit_compile,
    )
    return model


def build_layers(experiment: Experiment) -> keras.Model:
    """Builds the model of an experiment, without compiling it, in an engine's current scope."""
    keras.utils.set_random_seed(experiment.train.seed)
    with failures_of_class(experiment.model, "build"):
        model = models.build(experiment.model)
    config = experiment.model
    if config.lora:
        models.enable_lora(model, config.lora, config.lora_targets, config.lora_base)
    if config.freeze:
        models.freeze(model, config.freeze)
    scales = experiment.prepared_data is experiment.data  # unless a preprocessor scales pixels
    if scales and getattr(experiment.data, "image_dtype", None) == "uint8":
        model = pixels.standardize_pixels(model)
    return model


def build_plain_model(experiment: Experiment, trainer: Trainer) -> keras.Model:
    """Returns the model of a trainer as evaluation sees it, not compiled and without adapters.

    Its weights are the moving averages if the trainer keeps them; adapters are merged into these.
    """
    plain = build_layers(dataclasses.replace(experiment, model=remove_adapters(experiment)))
    models.assign_merged(plain, trainer.model, trainer.executor.averaged_weights())
    return plain


def remove_adapters(experiment: Experiment) -> ModelConfig:
    """Returns the config of an experiment's model, without adapters."""
    return dataclasses.replace(experiment.model, lora=0, lora_targets="", lora_base="")


def build_optimizer(experiment: Experiment) -> keras.optimizers.Optimizer:
    """Builds the optimizer of an experiment, which has a length in steps."""
    return keras_objects.build_optimizer(experiment, optimizers.build)


def build_trainer(
    experiment: Experiment,
    workdir: str | None,
    change: "Callable[[keras.Model], keras.Model]" = lambda model: model,
) -> Trainer:
    """Builds the model and the trainer of an experiment, in the current scope of an engine.

    Args:
        experiment: a validated experiment with a length in steps.
        workdir: folder of the run, local or `gs://`; None writes nothing.
        change: a function that returns another model with the same variables, such as one with
            further outputs.
    """
    return wrap_model(experiment, change(build_model(experiment)), workdir)


def wrap_model(experiment: Experiment, model: keras.Model, workdir: str | None) -> Trainer:
    """Builds the trainer of an experiment around its model; see `build_trainer`."""
    return Trainer(
        model,
        workdir,
        dataclasses.replace(experiment.train, best_metric=experiment.best_metric),
        objectives=build_objectives(experiment, model),
        hyperparameters=list_hyperparameters(experiment),
        sample=lambda trainer: sample.draw_text(experiment, trainer),
        base=models.base_of(model),
    )


def has_objectives(experiment: Experiment) -> bool:
    """Returns whether the model of an experiment has its own loss functions.

    Raises:
        UserError: it has them, and the experiment also sets a loss, metrics or label smoothing.
    """
    own = type(experiment.model).objectives is not ModelConfig.objectives
    named = ("loss", "metrics", "weighted_metrics")
    given = [name for name in named if getattr(experiment, name) not in (None, (), [])]
    given += ["train.label_smoothing"] if experiment.train.label_smoothing else []
    if own and given:
        raise UserError(
            f"{type(experiment.model).__name__} has objectives() with its own loss functions, so "
            f"leave out the experiment's {given[0]}."
        )
    return own


def build_objectives(experiment: Experiment, model: keras.Model) -> "Sequence[Objective]":
    """Returns the objectives of an experiment's model; () if it uses the compiled loss."""
    with failures_of_class(experiment.model, "objectives"):
        return tuple(experiment.model.objectives(model))


def resolve_length(experiment: Experiment, pipeline: Any = None) -> Experiment:
    """Returns the experiment with its length in steps, which may be converted from epochs.

    Args:
        experiment: the experiment; with a length in epochs, an `eval_every` of 0 becomes an epoch.
        pipeline: the training pipeline; None opens it if the length is in epochs.

    Raises:
        UserError: the length is given in epochs, but the number of examples is unknown.
    """
    train = experiment.train
    if train.epochs is None:
        return experiment
    if pipeline is None:
        pipeline = build_training_data(experiment)
    epoch = input_pipelines.steps_per_epoch(experiment.data, pipeline)
    every = train.eval_every or epoch
    steps = train.epochs * epoch
    train = dataclasses.replace(train, steps=steps, epochs=None, eval_every=every)
    return dataclasses.replace(experiment, train=train)


def list_hyperparameters(experiment: Experiment) -> dict[str, bool | int | float | str]:
    """Returns the fields of an experiment that have a value, by path, such as "optimizer.name"."""
    found: dict[str, Any] = {}
    for group in dataclasses.fields(experiment):
        value = getattr(experiment, group.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, KerasObject | Function):
            fields = dataclasses.asdict(value)  # pyright: ignore[reportArgumentType] (no class)
            found |= {f"{group.name}.{name}": part for name, part in fields.items()}
        elif value != ():
            found[group.name] = getattr(value, "name", value)
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in found.items()
        if value is not None and value != ""
    }


def load_initial_weights(experiment: Experiment, trainer: Trainer) -> str:
    """Loads the weights of `model.init_from` into a new run; a resumed run keeps its own.

    The base weights of adapters are not in the run's checkpoints, so they are loaded again.

    Returns:
        A message about what was loaded; "" if nothing was.

    Raises:
        UserError: the weights do not fit the model, or adapters have no base weights. A head with
            another shape keeps its initial weights.
    """
    config = experiment.model
    path, resumes = config.init_from, trainer.has_checkpoint()
    if config.lora and not path and type(config).__module__ == sizes.__name__:
        raise UserError(
            f"model.lora={config.lora} adapts trained weights: name them with model.init_from."
        )
    if not path or (resumes and not config.lora):
        return ""
    report = models.load_weights(trainer.model, path, replace_head=True)
    return "" if resumes else f"Weights from {path}: {report}."


def load_base(experiment: Experiment) -> "Callable[[keras.Model], keras.Model]":
    """Returns a function that loads base weights into a model with adapters, and returns the model.

    Checkpoints do not contain the base weights. A model without adapters stays as it is. The
    function raises `UserError` if the weights do not fit.
    """

    def load(model: keras.Model) -> keras.Model:
        if experiment.model.lora and experiment.model.init_from:
            models.load_weights(model, experiment.model.init_from, replace_head=True)
        return model

    return load


def build_training_data(experiment: Experiment) -> "ArrayPipeline | Pipeline | tf.data.Dataset":
    """Returns the training pipeline of an experiment."""
    with failures_of_class(experiment.data, "training"):
        return input_pipelines.training(experiment.prepared_data, experiment.train.seed)


def build_evaluation_data(experiment: Experiment) -> "tf.data.Dataset | None":
    """Returns the evaluation split of an experiment; None if it has none."""
    with failures_of_class(experiment.data, "evaluation"):
        return input_pipelines.evaluation(experiment.prepared_data, experiment.train.seed)


def _build_loss_and_metrics(experiment: Experiment) -> tuple[Any, Any, Any]:
    """Returns the loss, the metrics and the weighted metrics for `keras.Model.compile`."""
    metrics = keras_objects.build_objects(experiment.metrics, "metrics")
    weighted = keras_objects.build_objects(experiment.weighted_metrics, "weighted_metrics")
    if experiment.loss is not None:
        return keras_objects.build_objects(experiment.loss, "loss"), metrics, weighted
    if not metrics and not weighted:
        metrics, weighted = _build_default_metrics(experiment.data)
    return SmoothedCrossentropy(experiment.train.label_smoothing), metrics, weighted


def _build_default_metrics(data: DataConfig) -> tuple[list[keras.Metric], list[keras.Metric]]:
    """Returns the default metrics for class labels, as `metrics` and `weighted_metrics`."""
    found: list[keras.Metric] = [Accuracy()]
    if data.per_token:
        found = [BitsPerToken(), keras.metrics.SparseCategoricalAccuracy("accuracy")]
    return ([], found) if data.weighted else (found, [])
