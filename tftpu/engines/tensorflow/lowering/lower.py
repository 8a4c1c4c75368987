"""Lowers a compiled Keras model to the program of one replica, on a machine without a TPU.

The program is traced from the step that the trainer runs, under a strategy that reports N replicas
and uses XLA's all-reduce.
"""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu import sharding
from tftpu.blocks.running import has_blocks
from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data.conversion import replace_examples
from tftpu.engines.lowered import LoweredStep, ModelFn, ObjectivesOf, StateBytes, find_layer_path
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.tensorflow import internals, xla_ops
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.train_step import TrainStep
from tftpu.errors import UserError, find_first_line
from tftpu.optim.policy import building_under
from tftpu.tpu.slices import Slice

_LARGE = 4096  # elements; larger variables get zeros instead of their initial values
# `(x, y)` or `(x, y, sample_weight)`, where each is a `tf.TensorSpec` or a nest of them.
BatchSpec = Any


class TensorFlowBuiltStep:
    """The built train step of one replica; see `tftpu.engines.lowered.BuiltStep`.

    Args:
        state: the variables, which were created in the scope of the strategy.
        batch_spec: the spec of one replica's shard of the global batch.
        strategy: the strategy of all replicas.
        precision: dtype policy under which the model was built.
    """

    def __init__(
        self,
        state: ModelState,
        batch_spec: BatchSpec,
        strategy: tf.distribute.Strategy,
        precision: str,
    ):
        self._state, self._batch_spec = state, batch_spec
        self._strategy, self._precision = strategy, precision
        self.state_bytes = _count_state_bytes(state)
        self.has_blocks = has_blocks(state.model)
        self.model = state.model

    @functools.cached_property
    def _step(self) -> TrainStep:
        with _building_under(self._precision, self._strategy):
            return TrainStep(self._state, self._batch_spec)

    def count_flops(self) -> int:
        """Returns the model FLOPs of a step, divided by the number of replicas."""
        return self._step.model_flops // self._strategy.num_replicas_in_sync

    def lower(self) -> LoweredStep:
        """Lowers the train step of one replica."""
        strategy, batch_spec, model = self._strategy, self._batch_spec, self.model
        step = self._step
        flat = keras_internals.list_layers(model)
        layers = {layer.name: type(layer).__name__ for layer in flat}
        with sharding.compiling_for("tpu"):
            hlo, arguments = to_hlo(
                lambda batch: strategy.run(step.train, args=(batch,)),
                (batch_spec,),
                "hlo_serialized",
                layers,
            )
        examples = count_examples(batch_spec) // self._state.options.gradient_accumulation_steps
        microbatch = replace_examples(batch_spec, examples)
        # Lowered for a CPU, because matrix products inside TPU kernels would not be visible.
        forward, _ = to_hlo(step.forward, (microbatch,), "hlo", layers)
        return LoweredStep(
            program=hlo,
            partitioned=False,
            forward=forward,
            model_flops=self.count_flops(),
            arguments=arguments,
            layers=layers,
            numbered=True,
            # Grouped convolutions. A GroupNormalization also has `groups`, but no kernel size.
            grouped=[
                x.name for x in flat if hasattr(x, "kernel_size") and getattr(x, "groups", 1) > 1
            ],
            kernels={v.path: tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1},
            precision=self._precision,
            state_bytes=self.state_bytes,
        )


def _count_state_bytes(state: ModelState) -> StateBytes:
    """Returns the bytes of the variables on a device; each device has all variables."""
    optimizers = [v for group in state.groups for v in group.optimizer.variables]
    return StateBytes(
        count_bytes(state.model.variables), count_bytes(optimizers), count_bytes(state.averages)
    )


def count_bytes(variables: Iterable[Any]) -> int:
    """Returns the total size of variables in bytes."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


class TensorFlowLowering:
    """The lowering for data parallelism, one replica per device; see `tftpu.engines.lowered`."""

    remats = ("block",)

    def count_data_shards(self, target: Slice) -> int:
        """Returns the number of shards of a batch, one per device of the slice.

        Raises:
            UserError: the devices belong to several slices.
        """
        if target.slices > 1:
            raise UserError(
                f"The TensorFlow engine trains on one slice, but {target.name} has "
                f"{target.slices} slices: set cluster.engine=jax."
            )
        return target.replicas

    def format_mesh(self, devices: int) -> str:
        """Returns "", because this engine has no mesh: each device holds the whole model."""
        return ""

    def list_finer_lowerings(self, target: Slice) -> list["TensorFlowLowering"]:
        """Returns an empty list, because this engine cannot shard a model over devices."""
        return []

    def choose_compiler_options(self, target: Slice) -> dict[str, str]:
        """Returns an empty dict, because TensorFlow's runtime compiles with its own options."""
        return {}

    def build_model(self, model_fn: ModelFn, precision: str) -> keras.Model:
        """Builds a model, with zeros instead of initial values in its large variables."""
        with _building_under(precision, OneReplicaStrategy(1)):
            return model_fn()

    def build(
        self,
        model_fn: ModelFn,
        shard_spec: BatchSpec,
        devices: int,
        precision: str,
        options: TrainConfig,
        objectives: ObjectivesOf | None = None,
    ) -> TensorFlowBuiltStep:
        """Builds the train step of one device; all devices run the same step."""
        strategy = OneReplicaStrategy(devices)
        with _building_under(precision, strategy):
            model = model_fn()
            found = objectives(model) if objectives is not None else ()
            state = ModelState(model, shard_spec, options, found)
        return TensorFlowBuiltStep(state, shard_spec, strategy, precision)


class OneReplicaStrategy(tf.distribute.Strategy):
    """A strategy to trace one of N replicas, with plain variables and XLA's collectives."""

    def __init__(self, replicas: int):
        super().__init__(_Extended(self, replicas))


class _Extended(internals.OneDeviceExtended):
    """Implements `OneReplicaStrategy.extended`, a private interface of TensorFlow 2.19 to 2.21.

    Pyright rejects two overrides: it infers literal return types, 1 and True, of the base class.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replicas: int):
        super().__init__(strategy, "/cpu:0")
        self._replicas = replicas

    @property
    def _num_replicas_in_sync(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._replicas

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Creates a variable, with zeros that need no memory if it is large.

        Lowering a step needs only shapes. The values of a large model and its optimizer would take
        memory that the compiler needs. An initial value that is a tensor already is kept.
        """
        initial = kwargs["initial_value"]
        if callable(initial):
            shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
            if shape is None or dtype is None:
                with tf.Graph().as_default():
                    value: Any = initial()
                    abstract = tf.convert_to_tensor(value)
                shape, dtype = abstract.shape, abstract.dtype
            if tf.TensorShape(shape).num_elements() > _LARGE:
                return internals.create_empty_variable(tf.TensorShape(shape), dtype, kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _use_merge_call(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False  # the same as under TPUStrategy

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        # TPUStrategy would use the op CrossReplicaSum, for which a TensorFlow without TPU support
        # has no kernel.
        del options
        group = np.arange(self._replicas, dtype=np.int32)[None]

        def reduce(x: Any) -> Any:
            x = internals.sum_over_replicas(x, group)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                x /= tf.cast(self._replicas, x.dtype)
            return x

        return tf.nest.map_structure(reduce, value)


@contextlib.contextmanager
def _building_under(precision: str, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters the context in which a model and its step are built: policy, strategy, platform."""
    with (
        building_under(precision),
        strategy.scope(),
        keras_internals.fresh_names(),
        sharding.compiling_for("tpu"),
    ):
        yield


def to_hlo(
    function: Callable[..., Any], batch: tuple, stage: str, layers: Collection[str]
) -> tuple[Any, list[str]]:
    """Returns the HLO of a function of a batch, and the names of the program's parameters.

    `stage` is as for `internals.lower_to_hlo`. Raises `UserError` if XLA cannot compile the
    function; `layers` are the names of layers that the message may name.
    """
    traced: Any = tf.function(function, jit_compile=True, autograph=False)
    with warnings.catch_warnings():  # nothing runs, so dense gradients of embeddings need no memory
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices")
        concrete = traced.get_concrete_function(*batch)
    xla_ops.check_ops(xla_ops.list_graph_ops(concrete.graph))
    try:
        hlo = internals.lower_to_hlo(concrete, stage)
    except (tf.errors.OpError, ValueError) as error:
        raise UserError(_explain_failure(error, layers)) from error
    data = ["batch"] * len(keras.tree.flatten(batch))
    by_handle = {id(v.handle): v.name for v in concrete.graph.variables}
    captured = [by_handle.get(id(t), "constant") for t in concrete.captured_inputs]
    return hlo, [*data, *(name.removesuffix(":0") for name in captured)]


def _explain_failure(error: Exception, layers: Collection[str]) -> str:
    """Returns a message for the user, given an error of TensorFlow's compiler bridge."""
    message, first = str(error), find_first_line(error)[:300]
    node = re.search(r"\{\{(?:node|function_node) ([^}]+)\}\}", message)
    if not node:
        return f"XLA cannot compile the step. TensorFlow reports: {first}"
    layer, op = find_layer_path(node[1], layers), node[1].rsplit("/", 1)[-1]
    if "fixed tensor list size" in message:
        return (
            f"The layer {layer!r} has a loop that XLA cannot differentiate, because its maximum "
            "number of iterations is unknown: pass maximum_iterations to keras.ops.while_loop, or "
            "use keras.ops.scan or a Python loop over a fixed range. TensorFlow reports: "
            f"{first}"
        )
    return (
        f"The layer {layer!r} uses the op {op}, which XLA cannot compile in this form, so no TPU "
        "can run it: give it static shapes, or move it to the input pipeline. TensorFlow reports: "
        f"{first}"
    )
