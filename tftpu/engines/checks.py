"""Rejects models and data that an engine cannot use, with the reason, before training starts."""

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
from tftpu.errors import OwnStepsNeeded, UserError
from tftpu.tensors import Tensor, ops

if TYPE_CHECKING:
    from tftpu.engines.objectives.parameter_groups import ParameterGroup

# Methods of `keras.Model` that only its own train, test and predict steps call.
_OWN = (
    *("train_step", "test_step", "predict_step", "compute_metrics", "get_metrics_result"),
    *("reset_metrics", "make_train_function", "make_test_function", "make_predict_function"),
    *("compute_loss_and_updates", "stateless_compute_loss", "stateless_call"),
)


def refuse_model(
    model: keras.Model, objectives: Sequence[Objective] = (), labelled: bool = True
) -> None:
    """Raises `UserError` for a model that the engine's step, which divides a batch, cannot train.

    Args:
        model: the model.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether the model is trained or evaluated, for which it must be compiled.

    Raises:
        OwnStepsNeeded: the model's own steps can train it.
    """
    if keras.backend.backend() == "jax":
        _refuse_lookups(model)
        _refuse_tensorflow_variables(model, [one.loss_fn for one in objectives])
    if objectives:
        _refuse_stateful(model, UserError)
        _refuse_compiled_parts(model)
        for objective in objectives:
            optimizer: Any = keras.optimizers.get(objective.optimizer)
            _refuse_optimizer(getattr(optimizer, "inner_optimizer", optimizer), UserError)
        return
    if labelled and not getattr(model, "compiled", False):
        raise UserError(
            f"The model {model.name!r} is not compiled: call model.compile(optimizer=..., "
            "loss=...) first, or give objectives with your own losses."
        )
    method = find_own_method(model)
    if method:
        raise OwnStepsNeeded(f"{type(model).__name__} overrides {method}.")
    if model.run_eagerly:
        raise OwnStepsNeeded("The model was compiled with run_eagerly=True.")
    _refuse_stateful(model, OwnStepsNeeded)
    tracked = keras_internals.list_tracked_metrics(model)
    if tracked:
        raise OwnStepsNeeded(f"The model itself updates the metric {tracked[0].name!r}.")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        _refuse_optimizer(getattr(optimizer, "inner_optimizer", optimizer), OwnStepsNeeded)


def find_own_method(model: keras.Model) -> str | None:
    """Returns the first method for Keras's own steps that a model overrides, or None."""
    return next((name for name in _OWN if keras_internals.overrides(model, name)), None)


def explain_one_device(model: keras.Model) -> str:
    """Returns why several replicas, each with the whole batch, cannot train a model, or ""."""
    if find_own_method(model):  # the method's random numbers may differ between replicas
        return "the step is written for one"
    optimizer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is not None and (
        optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency
    ):
        return "the optimizer's gradient accumulation or EMA overwriting does not work on several"
    return ""


def _refuse_stateful(model: keras.Model, error: type[UserError]) -> None:
    stateful = [layer for layer in keras_internals.list_layers(model) if _is_stateful(layer)]
    if stateful:
        raise error(
            f"The layer {stateful[0].name!r} is stateful: it keeps a state from batch to batch, "
            "which replicas cannot share."
        )


def refuse_updates(
    updated: list[keras.Variable],
    model: keras.Model,
    statistics: list[keras.Variable],
    seeds: list[keras.Variable],
) -> None:
    """Raises `UserError` if a forward pass makes changes to variables that the step would lose.

    Args:
        updated: the variables that the forward pass changes.
        model: the model.
        statistics, seeds: the variables, besides the trained ones, whose changes the step keeps.
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
            raise OwnStepsNeeded(f"The loss updates the metric {measured[id(variable)]!r}.")
        if id(variable) not in known:
            raise UserError(
                f"The loss changes the variable {variable.path!r}, which is not part of the "
                "model, so the change would be lost. Make the variable, or the layer or "
                "keras.random.SeedGenerator that owns it, an attribute of the model."
            )


def refuse_assigned(variable: keras.Variable) -> None:
    """Raises `UserError` for a weight that a layer sets to a value from the batch or from noise."""
    raise UserError(
        f"A layer assigns its weight {variable.path!r} a value that depends on the batch or on "
        "random numbers. These differ between devices, so the devices would train different "
        "weights. Compute the value only from variables, or make the weight a variable with "
        "trainable=False."
    )


def refuse_counters(changed: Sequence[keras.Variable], disagreeing: str) -> None:
    """Raises `UserError` if a step changes variables that are not floats.

    Args:
        changed: the variables that the layers update.
        disagreeing: a plural noun for the copies that would differ, such as "replicas".
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
        changed: a description of each variable outside of the model that is changed.
    """
    if changed:
        raise UserError(
            f"The loss, a metric or a layer changes {changed[0]}, which is not part of the model: "
            "each device and each trial would change it, and no checkpoint would hold it. Make "
            "it an attribute of the model, keras.Variable(value, trainable=False), and assign it "
            "a mean over examples, or a value that is the same on all devices. Draw random "
            "numbers with keras.random and a SeedGenerator that is an attribute of the model."
        )


def refuse_frozen(model: keras.Model, groups: Sequence["ParameterGroup"], compiled: bool) -> None:
    """Raises `UserError` if an objective has nothing to train, or trains what is not a float.

    Args:
        model: the model.
        groups: the objectives.
        compiled: whether the only objective is the compiled loss.

    Raises:
        OwnStepsNeeded: the objective is the compiled loss, so Keras's own steps can run instead.
    """
    if not all(group.variables for group in groups):
        error = OwnStepsNeeded if compiled else UserError
        raise error(
            f"The model {model.name!r} has no trainable variables: the model or all of its layers "
            "have trainable=False. A layer trains only if its model is trainable too: set "
            "model.trainable = True, and freeze single layers."
        )
    for variable in (v for group in groups for v in group.variables):
        if not keras.backend.is_float_dtype(variable.dtype):
            raise UserError(
                f"The weight {variable.path!r} is trainable, but of the dtype "
                f"{variable.dtype}, which has no gradient: create it with trainable=False, or as "
                "a float."
            )


def refuse_unreached(terms: Sequence[Term], reached: Sequence[bool]) -> None:
    """Raises `UserError` if there is no loss, or if the loss depends on no variable.

    Args:
        terms: the terms of the loss.
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
        "nothing: it must be computed from the model's outputs, with operations that have "
        "gradients (not argmax, round, comparisons or NumPy)."
    )


def warn_of_means(group: "ParameterGroup", computed: Computed) -> None:
    """Warns of a loss that returns one number for a whole shard of the batch."""
    for term, elements in zip(group.losses.terms, computed.elements):
        if elements.is_scalar and term.counts and not elements.whole:
            warnings.warn(
                f"The loss {term.name!r} is one number for a whole batch. Each device computes it "
                "for its own shard, and the mean of the shards is used. So it depends on the "
                "number of devices and microbatches, unless the loss is a plain mean over "
                "examples of equal weight. To be exact, return one value for each example, "
                "of shape (batch,).",
                stacklevel=2,
            )


def warn_of_batch_statistics(model: keras.Model) -> bool:
    """Warns of layers that normalize over a part of a batch; returns whether there are any."""
    normalised = [
        layer.name
        for layer in keras_internals.list_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
    ]
    if normalised:
        warnings.warn(
            f"The layer {normalised[0]!r} ({len(normalised)} such) normalizes over the examples "
            "that one device has at a time, so its output depends on the number of devices and "
            "microbatches. Layers without this effect are LayerNormalization, "
            "GroupNormalization, and tftpu.models.layers.normalization.GhostBatchNormalization "
            "with its groups of a fixed size.",
            stacklevel=2,
        )
    return bool(normalised)


def refuse_synchronized(model: keras.Model) -> None:
    """Raises `UserError` for layers that exchange statistics, as microbatches cannot."""
    for layer in keras_internals.list_layers(model):
        is_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_norm and layer.synchronized and layer.trainable:
            raise UserError(
                f"The layer {layer.name!r} is synchronized: its devices exchange statistics, which "
                "does not work with gradient_accumulation_steps above 1 on several devices. Leave "
                "out synchronized=True, or use one microbatch."
            )


def refuse_states(names: Sequence[str], once: Sequence[Tensor], twice: Sequence[Tensor]) -> None:
    """Raises `OwnStepsNeeded` for a metric whose states are not sums over examples.

    Args:
        names: the names of the metric's states.
        once, twice: the values of the states after a batch, and after the same batch again.
    """
    for name, *values in zip(names, once, twice):
        first, second = (ops.convert_to_numpy(value) for value in values)
        if not np.allclose(2 * first, second, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise OwnStepsNeeded(
                f"The state {name!r} of a metric is not a sum over examples, so the states of "
                "devices cannot be added up."
            )


def _is_stateful(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.RNN) and bool(layer.stateful)


def _refuse_lookups(model: keras.Model) -> None:
    """Raises `UserError` for a preprocessing layer that only TensorFlow can run."""
    kinds = keras.layers
    lookups = (kinds.StringLookup, kinds.IntegerLookup, kinds.TextVectorization, kinds.Hashing)
    for layer in keras_internals.list_layers(model):
        if isinstance(layer, lookups):
            raise UserError(
                f"The layer {layer.name!r} is a {type(layer).__name__}, which works only under "
                "TensorFlow, but the model trains on JAX. Apply the layer in the input pipeline, "
                "data.map(lambda x, y: (layer(x), y)), and leave it out of the model."
            )


def _refuse_tensorflow_variables(model: keras.Model, functions: Sequence[Any]) -> None:
    """Raises `UserError` if a model or functions use a `tf.Variable`, which JAX cannot trace."""
    methods = [getattr(type(model), name, None) for name in ("call", "compute_loss", *_OWN)]
    found = dict(vars(model))
    for function in [*functions, *methods]:
        if inspect.isfunction(function):
            known = inspect.getclosurevars(function)
            found |= {**known.globals, **known.nonlocals}
    for name, value in found.items():
        if isinstance(value, tf.Variable):
            raise UserError(
                f"{name!r} is a tf.Variable, but the model trains on JAX, where a compiled step "
                "would keep the value that it has now. Make it a keras.Variable, as an attribute "
                "of the model."
            )


def _refuse_compiled_parts(model: keras.Model) -> None:
    """Raises `UserError` if `compile` was given a loss or metrics in addition to a `loss_fn`.

    Defaults that `compile` fills in itself are allowed, such as those of KerasHub's tasks.
    """
    arguments = keras_internals.compile_arguments(model)
    parameters = inspect.signature(type(model).compile).parameters.values()
    # Arguments that `compile` fills in itself have a string as default: box_loss="auto".
    own = [p.name for p in parameters if isinstance(p.default, str)]
    given = [
        kind
        for kind, end in (("a loss", "loss"), ("metrics", "metrics"))
        if any(name.endswith(end) for name in arguments)
        and not any(name.endswith(end) for name in own)
    ]
    if given:
        raise UserError(
            f"The model was compiled with {' and '.join(given)}, but here a loss function "
            "computes the losses. Compile the model with an optimizer only, and return measured "
            "values from the loss function, as (loss, {name: values})."
        )


def _refuse_optimizer(optimizer: Any, error: type[UserError]) -> None:
    if optimizer.gradient_accumulation_steps:
        raise error(
            "The optimizer has gradient_accumulation_steps. (TrainConfig("
            "gradient_accumulation_steps=N) divides each global batch into N microbatches on any "
            "number of devices.)"
        )
    if optimizer.use_ema:
        raise error(
            "The optimizer has use_ema=True. (TrainConfig(ema_momentum=0.999) keeps an average on "
            "any number of devices.)"
        )
    if keras_internals.has_own_apply(optimizer):
        raise error(
            f"The optimizer {type(optimizer).__name__} changes variables outside of its "
            "update_step."
        )


def refuse_spec(spec: Any) -> None:
    """Raises `UserError` for data that XLA cannot use: strings, ragged tensors, dynamic shapes."""
    if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string:
        is_text = isinstance(spec, tf.TensorSpec)
        kind = "string tensor" if is_text else type(spec).__name__
        how = ", such as dataset.map(lambda x, y: (vectorize(x), y))" if is_text else ""
        raise UserError(
            f"The data contains a {kind}, which cannot be sent to a device: convert it to dense "
            f"numbers in the input pipeline{how}."
        )
    if not spec.shape.is_fully_defined():
        raise UserError(
            f"The data contains a tensor of shape {tuple(spec.shape)}, but XLA compiles only "
            "static shapes: pad or crop to one size in the input pipeline."
        )
