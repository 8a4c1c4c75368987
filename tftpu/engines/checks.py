"""Models and data that cannot be trained as they are, rejected before training with the reason."""

import inspect
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.objectives.losses import Computed, Term
from tftpu.engines.objectives.objective import Objective
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops

if TYPE_CHECKING:
    from tftpu.engines.objectives.parameter_groups import ParameterGroup

# Methods of a model that the step does not call, and what to do instead of overriding them.
_OVERRIDES = {
    "train_step": "write the same logic as loss_fn(model, batch, training), which returns the loss "
    "of each example: Trainer(model, loss_fn=loss_fn), or with several optimizers "
    "Trainer(model, objectives=[...]); where only the loss is your own, override "
    "compute_loss(x, y, y_pred, sample_weight, training)",
    "test_step": "write the same logic as loss_fn(model, batch, training), which evaluation calls "
    "as well: Trainer(model, loss_fn=loss_fn); or put what it measures into compile(metrics=...)",
    "compute_metrics": "put the metrics into compile(metrics=...)",
}


def refuse_model(model: keras.Model, objectives: Sequence[Objective] = ()) -> None:
    """Raises `UserError` for a model with settings that the step would ignore."""
    stateful = [layer for layer in keras_internals.list_layers(model) if _is_stateful(layer)]
    if stateful:
        raise UserError(
            f"The layer {stateful[0].name!r} is stateful: it carries what it saw from batch to "
            "batch, which replicas cannot share. Build it with stateful=False."
        )
    if keras.backend.backend() == "jax":
        _refuse_lookups(model)
    if objectives:
        _refuse_compiled_parts(model)
        for objective in objectives:
            optimizer: Any = keras.optimizers.get(objective.optimizer)
            _refuse_optimizer(getattr(optimizer, "inner_optimizer", optimizer))
        return
    if not getattr(model, "compiled", False):
        raise UserError(
            f"The model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...)"
            " first, or give objectives, with losses of your own."
        )
    for method, instead in _OVERRIDES.items():
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UserError(
                f"{type(model).__name__} overrides {method}, which tftpu does not call: {instead}."
            )
    tracked = keras_internals.list_tracked_metrics(model)
    if tracked:
        raise UserError(
            f"The model updates the metric {tracked[0].name!r} within itself, which tftpu does not "
            "read: put it into compile(metrics=...)."
        )
    if model.run_eagerly:
        raise UserError(
            "The model was compiled with run_eagerly=True, and a TPU runs compiled programs only: "
            "leave it out."
        )
    if model.steps_per_execution > 1:
        raise UserError(
            f"The model was compiled with steps_per_execution={model.steps_per_execution}: leave "
            "it out, and pass TrainConfig(steps_per_loop=N) to the Trainer instead."
        )
    _refuse_optimizer(getattr(model.optimizer, "inner_optimizer", model.optimizer))


def refuse_updates(
    updated: list[keras.Variable],
    model: keras.Model,
    statistics: list[keras.Variable],
    seeds: list[keras.Variable],
) -> None:
    """Raises `UserError` if a forward pass changes variables that the step does not keep.

    Args:
        updated: the variables that it changes, besides the states of compiled metrics.
        model: the model.
        statistics, seeds: the variables of the model that are kept, besides its trained ones.
    """
    measured = {
        id(v): metric.name
        for metric in keras_internals.list_tracked_metrics(model)
        for v in metric.variables
    }
    own = [*model.trainable_variables, *statistics, *seeds]
    known = {id(v) for v in [*own, *keras_internals.list_compiled_states(model)]}
    for variable in updated:
        if id(variable) in measured:
            raise UserError(
                f"The loss updates the metric {measured[id(variable)]!r}, which tftpu does not "
                "read: return its value for each example from loss_fn, (loss, {name: values}), or "
                "put the metric into compile(metrics=...)."
            )
        if id(variable) not in known:
            raise UserError(
                f"The loss changes the variable {variable.path!r}, which is not part of the model, "
                "so the change would be lost: make it, or what owns it (a layer, or a "
                "keras.random.SeedGenerator), an attribute of the model."
            )


def refuse_assigned(variable: keras.Variable) -> None:
    """Raises `UserError` for a weight that a layer computes from the batch or from noise."""
    raise UserError(
        f"A layer assigns its weight {variable.path!r} a value that depends on the batch or on "
        "random numbers, of which each device has its own, so the devices would train different "
        "weights. Compute the value from variables alone, or make it a variable with "
        "trainable=False."
    )


def refuse_counters(changed: Sequence[keras.Variable], disagreeing: str) -> None:
    """Raises `UserError` for variables that a step changes and that are not floats.

    Args:
        changed: the variables that layers update.
        disagreeing: the parts of a batch whose updates would differ.
    """
    for variable in changed:
        if not keras.backend.is_float_dtype(variable.dtype):
            raise UserError(
                f"The layer variable {variable.path!r} is a {variable.dtype} that changes in "
                f"training: {disagreeing} would disagree about it. Keep such counts in a metric."
            )


def refuse_outside(changed: Sequence[str]) -> None:
    """Raises `UserError` for a variable outside of the model that a loss or a layer changes.

    Args:
        changed: all that are changed, in words.
    """
    if changed:
        raise UserError(
            f"The loss, a metric or a layer changes {changed[0]}, which is not part "
            "of the model: each device and each trial would change it, and no checkpoint would "
            "hold it. Make it an attribute of the model, keras.Variable(value, trainable=False), "
            "and assign it a value that is the same on all devices or a mean over examples; draw "
            "random numbers by keras.random, with a SeedGenerator of the model."
        )


def refuse_frozen(model: keras.Model, groups: Sequence["ParameterGroup"]) -> None:
    """Raises `UserError` if an objective has nothing to train."""
    if not all(group.variables for group in groups):
        raise UserError(
            f"The model {model.name!r} has no trainable variables: it, or all of its layers, have "
            "trainable=False. A layer trains only if its model is trainable too: set "
            "model.trainable = True, and freeze single layers."
        )


def refuse_unreached(terms: Sequence[Term], reached: Sequence[bool]) -> None:
    """Raises `UserError` if the loss depends on no variable, so that no step would change any.

    Args:
        terms: of the loss.
        reached: for each variable, whether the loss depends on it.
    """
    if any(reached):
        return
    if not terms:
        raise UserError(
            "There is no loss to train on: name one, as in model.compile(optimizer, loss='mse'), "
            "or pass a loss_fn to the Trainer."
        )
    raise UserError(
        f"The loss {terms[0].name!r} depends on no trainable variable, so training would change "
        "nothing: it must be computed from what the model returns, by operations that have "
        "gradients (not argmax, round, comparisons, or NumPy)."
    )


def warn_of_means(group: "ParameterGroup", computed: Computed) -> None:
    """Warns of a loss that its author reduced to one number for a shard of the batch."""
    for term, elements in zip(group.losses.terms, computed.elements):
        if elements.is_scalar and term.counts:
            warnings.warn(
                f"The loss {term.name!r} is one number for a whole batch. Each device computes it "
                "for its own share, and the mean is taken over shares: another number of devices "
                "or microbatches gives other numbers, unless the loss is a plain mean over equal "
                "examples. Return one value for each example, of shape (batch,), to be exact.",
                stacklevel=2,
            )


def warn_of_batch_statistics(model: keras.Model) -> bool:
    """Warns of layers that normalise over the examples of a part of a batch; returns whether."""
    normalised = [
        layer.name
        for layer in keras_internals.list_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
    ]
    if normalised:
        warnings.warn(
            f"The layer {normalised[0]!r} ({len(normalised)} such) normalises over the examples "
            "that one device has at a time: another number of devices or microbatches gives other "
            "numbers. tftpu.models.layers.normalization.GhostBatchNormalization, which takes "
            "groups of a fixed size, and LayerNormalization or GroupNormalization do not.",
            stacklevel=2,
        )
    return bool(normalised)


def refuse_states(names: Sequence[str], once: Sequence[Tensor], twice: Sequence[Tensor]) -> None:
    """Raises `UserError` for a metric whose states are not sums over examples.

    Args:
        names: of its states.
        once, twice: their values after a batch, and after the same batch twice.
    """
    for name, *values in zip(names, once, twice):
        first, second = (ops.convert_to_numpy(value) for value in values)
        if not np.allclose(2 * first, second, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise UserError(
                f"The state {name!r} of a metric is not a sum over examples: tftpu adds up the "
                "states of batches and devices, which would give a wrong number. Make the "
                "metric of sums and counts (as keras.metrics.Mean is), or compute it in a callback."
            )


def _is_stateful(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.RNN) and bool(layer.stateful)


def _refuse_lookups(model: keras.Model) -> None:
    """Raises `UserError` for a layer that looks values up by TensorFlow."""
    kinds = keras.layers
    lookups = (kinds.StringLookup, kinds.IntegerLookup, kinds.TextVectorization, kinds.Hashing)
    for layer in keras_internals.list_layers(model):
        if isinstance(layer, lookups):
            raise UserError(
                f"The layer {layer.name!r} is a {type(layer).__name__}, which works by TensorFlow "
                "alone, and the model trains on JAX: apply it in the input pipeline, "
                "data.map(lambda x, y: (layer(x), y)), and leave it out of the model."
            )


def _refuse_compiled_parts(model: keras.Model) -> None:
    """Raises `UserError` for a loss or metrics of `compile`, which a loss function replaces.

    What `compile` fills in itself, as that of KerasHub's tasks does, was not given to it.
    """
    arguments = keras_internals.compile_arguments(model)
    parameters = inspect.signature(type(model).compile).parameters.values()
    own = [p.name for p in parameters if isinstance(p.default, str)]  # as in box_loss="auto"
    given = [
        kind
        for kind, end in (("a loss", "loss"), ("metrics", "metrics"))
        if any(name.endswith(end) for name in arguments)
        and not any(name.endswith(end) for name in own)
    ]
    if given:
        raise UserError(
            f"The model was compiled with {' and '.join(given)}, and a loss function computes the "
            "losses here: compile it with an optimizer only, and return what is measured from the "
            "function, (loss, {name: values})."
        )


def _refuse_optimizer(optimizer: Any) -> None:
    if optimizer.gradient_accumulation_steps:
        raise UserError(
            "The optimizer has gradient_accumulation_steps: pass "
            "TrainConfig(gradient_accumulation_steps=N) to the Trainer instead, which cuts each "
            "global batch into N microbatches."
        )
    if optimizer.use_ema:
        raise UserError(
            "The optimizer has use_ema=True: pass TrainConfig(ema_momentum=0.999) to the Trainer "
            "instead, which keeps the average right on any number of replicas."
        )
    if keras_internals.has_own_apply(optimizer):
        raise UserError(
            f"The optimizer {type(optimizer).__name__} changes more than its update_step, which "
            "cannot be split over replicas: use adamw, sgd, lamb, lars, lion, adafactor or muon."
        )


def refuse_spec(spec: Any) -> None:
    """Raises `UserError` for data that no TPU can take: strings, ragged or dynamic shapes."""
    if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string:
        kind = "string tensor" if isinstance(spec, tf.TensorSpec) else type(spec).__name__
        raise UserError(
            f"The data has a {kind}, which cannot go to a device: make it dense numbers in the "
            "input pipeline."
        )
    if not spec.shape.is_fully_defined():
        raise UserError(
            f"The data has a tensor of shape {tuple(spec.shape)}: XLA compiles static shapes only. "
            "Pad or crop to one size in the input pipeline."
        )
