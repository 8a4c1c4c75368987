"""Train steps traced on a simulated slice, and the ops of their programs."""

import collections

import keras
import tensorflow as tf

from tests.support.steps.stepping import train_step
from tftpu.engines.tensorflow import feed, internals, xla_ops
from tftpu.engines.tensorflow.engine import TensorFlowEngine
from tftpu.engines.tensorflow.step.loops import build_device_loop
from tftpu.engines.tensorflow.step.train_step import TrainStep

REPLICAS = 8


def replica_ops(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops of the program that runs on the TPU, without those of its host."""
    marked = [op for op in xla_ops.list_graph_ops(graph) if "_tpu_replicate" in op.node_def.attr]
    bodies = [
        b
        for op in marked
        for b in internals.list_called_functions(internals.list_functions(op.graph), op)
    ]
    # The bodies of loops and branches within the program are not marked.
    inner = [op for body in bodies for op in xla_ops.list_graph_ops(body)]
    return list({id(op): op for op in [*marked, *inner]}.values())


def traced(model: keras.Model, batch: tuple, **options) -> tuple[TrainStep, list[tf.Operation]]:
    """Returns the ops of a device loop of the model, on a simulated v3-8.

    Args:
        model: compiled, built in the scope of a simulated slice.
        batch: `tf.TensorSpec`s of one replica's share.
    """
    strategy = model.distribute_strategy
    engine = TensorFlowEngine(strategy)
    with engine.scope():
        step = train_step(model, batch, **options)
    whole = keras.tree.map_structure(
        lambda s: tf.zeros((2, REPLICAS * s.shape[0], *s.shape[1:]), s.dtype), batch
    )
    data = tf.data.Dataset.from_tensor_slices(whole)

    loop = build_device_loop(strategy, step.train, step.synchronise)
    iterator = iter(feed.distribute(data, strategy))
    with engine.scope():
        graph = loop.get_concrete_function(iterator, tf.constant(2)).graph
    return step, replica_ops(graph)


def assert_one_reduction_and_no_host_op(step: TrainStep, ops: list[tf.Operation]) -> None:
    sums = [op for op in ops if op.type == "CrossReplicaSum"]
    gradients = [v.shape for v in step.state.model.trainable_variables]
    others = [v.shape for v in step.statistics]  # once a loop, for their mean
    if None in step.divisors:
        others.append((len(step.divisors),))
    found = collections.Counter(tuple(op.inputs[0].shape) for op in sums)
    assert found == collections.Counter(tuple(shape) for shape in [*gradients, *others])
    # Only the loss scale's skipped steps need a broadcast, of their count.
    broadcasts = sum(op.type == "AllToAll" for op in ops)
    assert broadcasts == isinstance(step.state.model.optimizer, keras.optimizers.LossScaleOptimizer)
    host = {op.type for op in ops if not internals.has_xla_kernel(op.type)}
    assert host <= TPU_ONLY, f"no TPU kernel: {host - TPU_ONLY}"


# Ops that only a TPU has, or that only mark where a program begins.
TPU_ONLY = {
    "TPUReplicateMetadata",
    "TPUReplicatedInput",
    "TPUReplicatedOutput",
    "TPUCompilationResult",
    "CrossReplicaSum",
    "AllToAll",
}
