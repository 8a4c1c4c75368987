"""From a compiled Keras model to the program that one replica of N runs, without a TPU.

Not a copy of the step: `tftpu.engines.tensorflow.step.Step` itself, made and traced under a strategy that says it
has N replicas and whose all-reduce is XLA's.
"""

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines.tensorflow import checks, internals
from tftpu.engines.tensorflow.step import Step
from tftpu.errors import UserError
from tftpu.preflight.hlo import layer_path
from tftpu.tpu import target


@dataclasses.dataclass
class Program:
    """A step, lowered, and what is known of the model that it trains.

    Attributes:
        hlo: serialized HloModuleProto of the train step.
        forward: the HLO text of the forward pass over one microbatch, as in evaluation: what a
            layer works out for batch statistics is none of the model's FLOPs.
        gradient_accumulation_steps: microbatches a step.
        arguments: the name of each parameter of the program: "batch", or a variable's path.
        layers: the class of every Keras layer by its name, nested ones too.
        grouped: the names of the layers with grouped convolutions.
        kernels: the shape of every kernel, a weight of two dimensions or more, by its path.
        precision: the dtype policy that the model was built under.
    """

    hlo: bytes
    forward: str
    gradient_accumulation_steps: int
    arguments: list[str]
    layers: dict[str, str]
    grouped: list[str]
    kernels: dict[str, tuple[int, ...]]
    precision: str


def lower(
    model_fn: Callable[[], keras.Model],
    batch: Any,
    replicas: int,
    precision: str,
    gradient_accumulation_steps: int = 1,
    **options,
) -> Program:
    """The program of one replica's train step.

    Args:
        model_fn: makes the compiled Keras model.
        batch: one replica's share, `(x, y)` or `(x, y, sample_weight)` of `tf.TensorSpec`s.
        replicas: how many share the global batch.
        precision: the dtype policy that the model is built under.
        gradient_accumulation_steps: microbatches a step.
        options: the other options of `tftpu.engines.tensorflow.step.Step`.

    Raises:
        UserError: XLA cannot compile the step; the message names the layer and the op.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        strategy = OneReplicaOf(replicas)
        with strategy.scope(), internals.fresh_names(), target.compiling_for("tpu"):
            model = model_fn()
            step = Step(
                model, batch, gradient_accumulation_steps=gradient_accumulation_steps, **options
            )
    finally:
        keras.config.set_dtype_policy(before)
    flat = internals.flat_layers(model)
    layers = {layer.name: type(layer).__name__ for layer in flat}
    grouped = [layer.name for layer in flat if getattr(layer, "groups", 1) > 1]
    kernels = {v.path: tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1}
    with target.compiling_for("tpu"):
        train, arguments = _trace(lambda *b: strategy.run(step.train, args=(b,)), batch)
    hlo = _to_hlo(train, "hlo_serialized", layers)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    micro = keras.tree.map_structure(
        lambda s: tf.TensorSpec((s.shape[0] // gradient_accumulation_steps, *s.shape[1:]), s.dtype),
        x,
    )
    with target.compiling_for("tpu"):
        forward, _ = _trace(lambda x: model(x, training=False), (micro,))
    forward = _to_hlo(forward, "hlo", layers)
    return Program(
        hlo, forward, gradient_accumulation_steps, arguments, layers, grouped, kernels, precision
    )


class OneReplicaOf(tf.distribute.Strategy):
    """The first of `replicas` replicas: its variables are plain, its collectives XLA's."""

    def __init__(self, replicas: int):
        super().__init__(_Extended(self, replicas))


class _Extended(internals.OneDeviceExtended):
    """Private interface of TensorFlow: tried with 2.19 to 2.21."""

    def __init__(self, strategy: tf.distribute.Strategy, replicas: int):
        super().__init__(strategy, "/cpu:0")
        self._replicas = replicas

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._replicas

    def _use_merge_call(self) -> bool:
        return False  # as under TPUStrategy

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        # CrossReplicaSum, which TPUStrategy would emit, has no kernel in a wheel without TPUs.
        del options
        group = np.arange(self._replicas, dtype=np.int32)[None]

        def reduce(x):
            x = internals.xla_sum(x, group)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                x /= tf.cast(self._replicas, x.dtype)
            return x

        return tf.nest.map_structure(reduce, value)


def _trace(function: Callable, batch: tuple) -> tuple[Any, list[str]]:
    """The concrete function of a batch, and the names of its parameters."""
    function = tf.function(function, jit_compile=True, autograph=False)
    concrete = function.get_concrete_function(*batch)
    checks.refuse_host_ops(checks.graph_ops(concrete.graph))
    data = ["batch"] * len(keras.tree.flatten(batch))
    by_handle = {id(v.handle): v.name for v in concrete.graph.variables}
    captured = [by_handle.get(id(t), "constant") for t in concrete.captured_inputs]
    return concrete, [*data, *(name.removesuffix(":0") for name in captured)]


def _to_hlo(concrete: Any, stage: str, layers: Collection[str]) -> Any:
    try:
        return internals.compiler_ir(concrete, stage)
    except (tf.errors.OpError, ValueError) as error:
        raise UserError(_explain_failure(str(error), layers)) from error


def _explain_failure(message: str, layers: Collection[str]) -> str:
    """One sentence for people out of the error of TensorFlow's bridge to XLA."""
    node = re.search(r"\{\{(?:node|function_node) ([^}]+)\}\}", message)
    first = message.strip().splitlines()[0][:300]
    if not node:
        return f"XLA cannot compile the step. TensorFlow says: {first}"
    layer, op = layer_path(node[1], layers), node[1].rsplit("/", 1)[-1]
    return (
        f"The layer {layer!r} uses the op {op}, which XLA cannot compile as it is, so no TPU can "
        f"run it: give it static shapes, or move it to the input pipeline. TensorFlow says: {first}"
    )
