"""Every private interface of Keras and TensorFlow that the core uses, one small function each.

Tried with Keras 3.13 - 3.15 on TensorFlow 2.19 - 2.21; `tests/test_keras_internals.py` fails
loudly when one of them changes.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute import one_device_strategy
from tensorflow.python.eager.polymorphic_function import compiler_ir as _compiler_ir
from tensorflow.python.framework import kernels

# What a strategy of one device does; preflight's says that there are more.
OneDeviceExtended = one_device_strategy.OneDeviceExtended

# What XLA compiles without a kernel: arguments, and calls whose bodies are looked at themselves.
_STRUCTURE = {"Placeholder", "PartitionedCall", "StatefulPartitionedCall", "NoOp"}


class Term(NamedTuple):
    """One loss of a compiled model, of one of its outputs, times `weight`."""

    name: str
    loss: keras.losses.Loss
    weight: float


class BoundMetric(NamedTuple):
    """A compiled metric and which of the flattened outputs it reads."""

    metric: keras.Metric
    output: int
    weighted: bool


def build(model: keras.Model, batch: Any) -> None:
    """Creates whatever `fit` would create on its first batch: weights, losses, metrics, slots.

    Args:
        model: a compiled model.
        batch: `(x, y, sample_weight)` of `keras.KerasTensor`, static shapes.
    """
    model._symbolic_build(data_batch=batch)


def loss_terms(model: keras.Model) -> list[Term]:
    """The losses of a compiled and built model, one for each output that has one."""
    if model._compile_loss is None:
        return []
    return [
        Term(name, loss, 1.0 if weight is None else weight)
        for _, loss, weight, name in model._compile_loss._flat_losses
    ]


def match_losses(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> list[tuple]:
    """What Keras would hand to each loss: `(y, y_pred, sample_weight)`, one for each term.

    Keras reconciles lists, dicts and missing labels in many ways. Its own code runs here, with
    recorders in place of the losses.
    """
    compiled, seen = model._compile_loss, []

    def record(y_true, y_pred, sample_weight):
        seen.append((y_true, y_pred, sample_weight))
        return tf.zeros(())

    losses = compiled._flat_losses
    compiled._flat_losses = [term._replace(loss=record) for term in losses]
    try:
        compiled(y, y_pred, sample_weight)
    finally:
        compiled._flat_losses = losses
    return seen


def bound_metrics(model: keras.Model) -> list[BoundMetric]:
    """The metrics of a compiled and built model, in the order of its `compute_metrics`."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    return [
        BoundMetric(metric, output, weighted)
        for weighted, lists in (
            (False, compiled._flat_metrics),
            (True, compiled._flat_weighted_metrics),
        )
        for output, metrics in enumerate(lists)
        for metric in (metrics.metrics if metrics else ())
    ]


def metric_values(metric: keras.Metric, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor | None:
    """What the function that a metric is the mean of returns; None for other metrics."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return None
    return tf.convert_to_tensor(metric._fn(y, y_pred, **metric._fn_kwargs))


def tracked_metrics(model: keras.Model) -> list[keras.Metric]:
    """Metrics that a model or its layers hold and update by themselves, not those of compile()."""
    nested = [m for layer in flat_layers(model) if not isinstance(layer, keras.Model)
              for m in layer.metrics]  # fmt: skip
    return [*model._metrics, *nested]


def metric_results(model: keras.Model) -> dict[str, Any]:
    """The results of the compiled metrics, under the names that Keras's `fit` gives them."""
    return model._compile_metrics.result() if model._compile_metrics is not None else {}


def flatten_outputs(model: keras.Model, y: Any) -> list:
    """Labels or predictions as a flat list, in the order that `bound_metrics` counts in."""
    return model._compile_metrics._flatten_y(y)


def keras_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """The mask that masking layers attached to an output, or None."""
    return getattr(tensor, "_keras_mask", None)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of all seed generators that the model may draw from, Keras's global one too."""
    own = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    # A layer that draws with seed=None uses the global generator, which belongs to no model.
    return [*own, seed_generator.global_seed_generator().state]


def example_seeds(model: keras.Model) -> list[keras.Variable]:
    """The states of the generators that draw by an example's place in the global batch.

    Each is (seed, draws so far, place of the first example in hand), as that of
    `tftpu.models.layers.stochastic_depth.ExampleSeed`.
    """
    return [v for v in model.non_trainable_variables if v.name == "example_seed"]


def apply_weight_decay(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """The optimizer's decoupled weight decay, on this replica's own copies of the variables."""
    own = type(optimizer)._apply_weight_decay
    if own is keras.optimizers.SGD._apply_weight_decay:
        # TensorFlow's variant of the usual one leaves the replica, which a branch may not.
        own = base_optimizer.BaseOptimizer._apply_weight_decay
    own(optimizer, variables)


def clip(optimizer: keras.optimizers.Optimizer, grads: list) -> list:
    """The gradients clipped as the optimizer's clipnorm, global_clipnorm or clipvalue says."""
    return optimizer._clip_gradients(grads)


def overrides_apply(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer does more in a step than its `update_step` for each variable."""
    plain = keras.optimizers.SGD
    methods = ("apply", "_backend_apply_gradients", "_backend_update_step")
    return any(getattr(type(optimizer), m) is not getattr(plain, m) for m in methods)


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Names that Keras makes up count from the start within, as "dense", "dense_1", …"""
    key = "object_name_uids"
    before = global_state.get_global_attribute(key)
    global_state.set_global_attribute(key, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(key, before)


def flat_layers(model: keras.Model) -> list[keras.Layer]:
    """All layers of the model, nested ones too."""
    return list(model._flatten_layers(include_self=False))


def xla_kernel(op_type: str) -> bool:
    """Whether XLA can compile the op. Plain wheels hold no TPU kernels, so XLA's CPU ones tell."""
    if op_type in _STRUCTURE:
        return True
    return "XLA_CPU_JIT" in kernel_devices(op_type)


def kernel_devices(op_type: str) -> set[str]:
    """The kinds of device that the loaded TensorFlow has a kernel of the op for."""
    found = kernels.get_registered_kernels_for_op(op_type).kernel
    return {kernel.device_type for kernel in found}


def called_functions(graph: tf.Graph, op: tf.Operation) -> list[tf.Graph]:
    """The bodies of the functions that a graph op calls, as graphs."""
    names = [f.name for attr in op.node_def.attr.values() for f in (attr.func, *attr.list.func)]
    found = []
    while graph is not None:
        known = graph._functions
        found += [known[name].graph for name in names if name in known]
        graph = getattr(graph, "outer_graph", None)
    return found


def layer_of(op: tf.Operation) -> str:
    """The Keras layer that made a graph op, by the name scopes in the op's name; "" if none."""
    scopes = [re.sub(r"_\d+$", "", scope) for scope in op.name.split("/")[:-1]]
    return scopes[-1] if scopes else ""


def xla_sum(tensor: tf.Tensor, group: np.ndarray) -> tf.Tensor:
    """XLA's all-reduce over replicas, a sum; it compiles, and runs nowhere here.

    Args:
        group: (groups, replicas), int32: who adds up with whom.
    """
    return gen_xla_ops.xla_all_reduce(
        tensor, group_assignment=group, reduce_op="Add", mode="CrossReplica"
    )


def compiler_ir(concrete: Any, stage: str) -> Any:
    """A concrete function, traced with `jit_compile`, as XLA takes it.

    Args:
        stage: "hlo" gives text, "hlo_serialized" an HloModuleProto.
    """
    return _compiler_ir.from_concrete_function(concrete)(stage=stage)


def callback_list(callbacks: list, model: keras.Model, epochs: int, steps: int) -> Any:
    """Keras's own fan-out of callbacks, with its `History` added."""
    return keras.callbacks.CallbackList(
        callbacks, add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
    )


def history_of(callbacks: keras.callbacks.CallbackList) -> keras.callbacks.History:
    """The `History` that a callback list was made with."""
    return callbacks._history
