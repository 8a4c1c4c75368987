"""Models and data that cannot be trained as they are, rejected before training with the reason."""

from typing import Any

import keras
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.tensorflow import internals
from tftpu.errors import UserError

# Methods of a model that the step does not call, and what to do instead of overriding them.
_OVERRIDES = {
    "train_step": "put the loss into compile() or add_loss()",
    "test_step": "put what it measures into compile(metrics=...)",
    "compute_loss": "put the loss into compile(loss=...) or add_loss()",
    "compute_metrics": "put the metrics into compile(metrics=...)",
}


def refuse_model(model: keras.Model) -> None:
    """Raises `UserError` for a model with settings that the step would ignore."""
    if not getattr(model, "compiled", False):
        raise UserError(
            f"The model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...)"
            " before making a Trainer."
        )
    for method, instead in _OVERRIDES.items():
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UserError(
                f"{type(model).__name__} overrides {method}, which tftpu does not call: {instead}."
            )
    tracked = keras_internals.tracked_metrics(model)
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
    _refuse_optimizer(getattr(model.optimizer, "inner_optimizer", model.optimizer))


def _refuse_optimizer(optimizer: Any) -> None:
    if optimizer.gradient_accumulation_steps:
        raise UserError(
            "The optimizer has gradient_accumulation_steps: pass "
            "TrainOptions(gradient_accumulation_steps=N) to the Trainer instead, which cuts each "
            "global batch into N microbatches."
        )
    if optimizer.use_ema:
        raise UserError(
            "The optimizer has use_ema=True: pass TrainOptions(ema_momentum=0.999) to the Trainer "
            "instead, which keeps the average right on any number of replicas."
        )
    if keras_internals.overrides_apply(optimizer):
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


def refuse_host_ops(ops: list[tf.Operation]) -> None:
    """Raises `UserError`, naming the layer, if there is an op that XLA cannot compile."""
    for op in ops:
        if not internals.xla_kernel(op.type):
            layer = internals.layer_of(op)
            raise UserError(
                f"The layer {layer!r} uses the op {op.type}, which XLA cannot compile, so no TPU "
                "can run it. Move it to the input pipeline (tf.data), or remove the layer."
            )


def graph_ops(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops of a graph and of all the functions that it calls."""
    ops: list[tf.Operation] = []
    seen: set[int] = set()
    todo = [graph]
    while todo:
        here = todo.pop()
        for op in here.get_operations():
            ops.append(op)
            for body in internals.called_functions(here, op):
                if id(body) not in seen:
                    seen.add(id(body))
                    todo.append(body)
    return ops
