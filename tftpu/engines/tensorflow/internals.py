"""The private interfaces of TensorFlow that this engine uses, each in one small function.

Tested with TensorFlow 2.19 - 2.21 and Keras 3.14 - 3.15; `tests/engines/test_internals.py` fails
when one of them changes.
"""

import contextlib
import functools
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import one_device_strategy
from tensorflow.python.eager.polymorphic_function import compiler_ir as _compiler_ir
from tensorflow.python.framework import auto_control_deps_utils as control_deps
from tensorflow.python.framework import config, function_def_to_graph, kernels
from tensorflow.python.ops import resource_variable_ops

# Implements `strategy.extended` for one device. Preflight's subclass reports several replicas.
OneDeviceExtended = one_device_strategy.OneDeviceExtended

# Operations that XLA compiles without a kernel: arguments, and calls of functions, whose bodies are
# checked separately.
_STRUCTURE = {"Placeholder", "PartitionedCall", "StatefulPartitionedCall", "NoOp"}
# Operations that use a table or a summary writer without changing anything that training reads.
_READING = {
    *("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2", "FlushSummaryWriter"),
    # Sums over GPUs, which a variable of each device only puts in order.
    *("CollectiveReduceV2", "CollectiveReduceScatterV2", "CollectiveGatherV2"),
}
_replacing = threading.Lock()  # held by the thread that replaces a function of TensorFlow
_WRITING_SUMMARIES = re.compile("Write[A-Za-z]*Summary")


def create_empty_variable(shape: Any, dtype: Any, arguments: dict[str, Any]) -> Any:
    """Returns a variable of zeros that uses no memory until it is written.

    TensorFlow can lower a function only if its variables have values. The operating system
    allocates memory for these zeros only when they are first written.

    Args:
        shape, dtype: the shape and dtype of the variable.
        arguments: the other arguments of the variable creator.
    """
    kept = ("trainable", "name", "synchronization", "aggregation", "distribute_strategy")
    given = {name: arguments[name] for name in kept if name in arguments}
    variable = resource_variable_ops.UninitializedVariable(shape=shape, dtype=dtype, **given)
    dtype = tf.as_dtype(dtype)
    pages = mmap.mmap(-1, shape.num_elements() * dtype.size)
    zeros = np.frombuffer(pages, f"u{dtype.size}").reshape(shape.as_list())
    variable.assign(tf.bitcast(tf.experimental.dlpack.from_dlpack(zeros.__dlpack__()), dtype))
    return variable


def create_iterator(distributed: Any, adapt: Callable[[tf.data.Dataset], tf.data.Dataset]) -> Any:
    """Returns an iterator over a strategy's data set.

    Args:
        distributed: the data set.
        adapt: a function applied to the data set that each device prefetches from, which has none
            of the options of the user's data set.
    """
    module: Any = multi_device_iterator_ops
    with _replacing:
        before = module._create_device_dataset
        module._create_device_dataset = lambda *arguments: adapt(before(*arguments))
        try:
            return iter(distributed)
        finally:
            module._create_device_dataset = before


@functools.cache
def has_xla_kernel(op_type: str) -> bool:
    """Returns whether XLA can compile an op.

    Checks XLA's CPU kernels, because TensorFlow packages without TPU support have no TPU kernels.
    """
    return op_type in _STRUCTURE or "XLA_CPU_JIT" in list_kernel_devices(op_type)


def list_kernel_devices(op_type: str) -> set[str]:
    """Returns the device types, such as "CPU", for which this TensorFlow has a kernel of an op."""
    found = kernels.get_registered_kernels_for_op(op_type).kernel
    return {kernel.device_type for kernel in found}


def build_graph_function(function: Callable[..., Any], jit_compile: bool | None = None) -> Any:
    """Returns a `tf.function` that causes no warning about frequent retracing.

    Each trainer creates its own function. TensorFlow would treat all of them as one function that
    is traced repeatedly.
    """
    made: Any = tf.function(function, jit_compile=jit_compile, autograph=False)
    made._omit_frequent_tracing_warning = True
    return made


def is_deterministic() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def list_changed_resources(graph: Any) -> list[str]:
    """Describes the variables outside of a function that its ops may change, for messages.

    Queues, tables and random generators are included.

    Args:
        graph: the graph of the function.
    """
    found = []
    for owner, kind in _list_changed(graph):
        name = getattr(owner, "name", None)
        found.append(
            f"the variable {name!r}" if name else f"a resource such as a queue or a table ({kind})"
        )
    return found


def _divide(gradient: Any, replicas: int) -> Any:
    """Divides the sum of the replicas' gradients, which are equal, by their number; keeps None.

    The sum of an embedding's `IndexedSlices` is the concatenation of all replicas' slices. These
    are merged, because optimizers would apply each slice separately.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return None if gradient is None else gradient / replicas
    indices = tf.reshape(gradient.indices, (replicas, -1))
    equal = tf.debugging.assert_equal(
        indices,
        indices[:1],
        "The devices look up different ids of an embedding for the same batch, because the model "
        "draws the ids at random: draw them in the input pipeline.",
    )
    with tf.control_dependencies([equal]):
        values = tf.reshape(gradient.values, (replicas, -1, *gradient.values.shape[1:]))
    return tf.IndexedSlices(tf.reduce_mean(values, 0), indices[0], gradient.dense_shape)


@contextlib.contextmanager
def averaged_gradients() -> Iterator[None]:
    """Makes optimizers use the mean of the replicas' gradients, not their sum, in the block.

    Replicas that all have the same batch then train as one device does.
    """
    add_up = TFOptimizer._all_reduce_sum_gradients

    def average(self: Any, grads_and_vars: Any) -> Any:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return [(_divide(gradient, replicas), v) for gradient, v in add_up(self, grads_and_vars)]

    TFOptimizer._all_reduce_sum_gradients = average
    try:
        yield
    finally:
        TFOptimizer._all_reduce_sum_gradients = add_up


def list_changed_variables(graph: Any) -> list[tf.Variable]:
    """Returns the variables outside of a function that its ops may change.

    Args:
        graph: the graph of the function.

    Raises:
        LookupError: an op may change a resource that is not a variable; the message is its type.
    """
    found = []
    for owner, kind in _list_changed(graph):
        if not isinstance(owner, tf.Variable):
            raise LookupError(kind)
        found.append(owner)
    return found


def find_whole_variable(variable: Any) -> Any:
    """Returns the distributed variable of which `variable` is a replica's copy, or `variable`."""
    whole = getattr(variable.handle, "_distributed_container", lambda: None)()
    return variable if whole is None else whole


def _list_changed(graph: Any) -> list[tuple[Any, str]]:
    """Returns (variable, op type) for each variable or table that ops of a function may change."""
    read = control_deps.get_read_only_resource_input_indices_graph(graph)
    places = {id(tensor): place for place, tensor in enumerate(graph.inputs)}
    found = []
    for outside, inside in graph.captures:
        if inside.dtype != tf.resource or places[id(inside)] in read:
            continue
        op = _find_changing_op(inside, list_functions(graph))
        if op is None:
            continue
        owner = getattr(outside, "_parent_trackable", lambda: None)()
        found.append((owner, op.type))
    return found


def _find_changing_op(resource: tf.Tensor, known: dict[str, Any]) -> Any:
    """Returns an op that may change a resource, also in called functions; None if none does."""
    for op in resource.consumers():
        if op.type in control_deps.RESOURCE_READ_OPS or op.type in _READING:
            continue
        if _WRITING_SUMMARIES.fullmatch(op.type):
            continue
        bodies = list_called_functions(known, op)
        if not bodies:
            return op
        for body in bodies:
            # All inputs are arguments of the body, except a branch's condition, which comes first.
            first = len(op.inputs) - len(body.inputs)
            if first not in (0, 1):
                return op
            given = [own for own, one in zip(body.inputs, op.inputs[first:]) if one is resource]
            for own in given:
                found = _find_changing_op(own, list_functions(body) | known)
                if found is not None:
                    return found
    return None


def list_called_functions(known: dict[str, Any], op: tf.Operation) -> list[tf.Graph]:
    """Returns the bodies of the functions that a graph op calls, as graphs.

    Args:
        known: the result of `list_functions` for the graph of the op.
        op: the op that calls functions.
    """
    names = [f.name for attr in op.node_def.attr.values() for f in (attr.func, *attr.list.func)]
    return [_find_body(known[name], known) for name in (op.type, *names) if name in known]


def find_function(attribute: Any, known: dict[str, Any]) -> Any:
    """Returns the body of the function that an op's attribute refers to, as a graph.

    Args:
        attribute: the value of the attribute.
        known: the result of `list_functions` for the graph of the op.
    """
    return _find_body(known[attribute.name], known)


def is_call(op: tf.Operation) -> bool:
    """Returns whether a graph op's type is the name of a function, as in TensorFlow 1 graphs."""
    return op.type in list_functions(op.graph)


def list_functions(graph: Any) -> dict[str, Any]:
    """Returns the functions that the ops of a graph may call, by name."""
    found: dict[str, Any] = {}
    while graph is not None:
        found = {**graph._functions, **found}
        graph = getattr(graph, "outer_graph", None)
    return found


def _find_body(function: Any, known: dict[str, Any]) -> Any:
    """Returns the body of a function, as a graph.

    Functions from TensorFlow 1 code, such as the scan in `tf.nn.ctc_loss`, have no graph but a
    definition that calls other functions by name.
    """
    if hasattr(function, "graph"):
        return function.graph
    library = tf.Graph()
    for other in known.values():
        if hasattr(other, "add_to_graph"):
            other.add_to_graph(library)  # also adds the functions that this one calls
        else:
            library._add_function(other)
    with library.as_default():
        return function_def_to_graph.function_def_to_graph(function.definition)


def find_layer(op: tf.Operation) -> str:
    """Returns the Keras layer's name in a graph op's innermost name scope; "" without a scope."""
    scopes = [re.sub(r"_\d+$", "", scope) for scope in op.name.split("/")[:-1]]
    return scopes[-1] if scopes else ""


def sum_over_replicas(tensor: tf.Tensor, group: np.ndarray) -> tf.Tensor:
    """Returns a sum over replicas by XLA's all-reduce, which compiles but cannot run on a CPU.

    Args:
        tensor: the value of this replica.
        group: the ids of the replicas in each group to sum, (groups, replicas), int32.
    """
    return gen_xla_ops.xla_all_reduce(
        tensor, group_assignment=group, reduce_op="Add", mode="CrossReplica"
    )


def lower_to_hlo(concrete: Any, stage: str) -> Any:
    """Returns the XLA program of a concrete function that was traced with `jit_compile`.

    Args:
        concrete: the concrete function.
        stage: "hlo" for text, "hlo_serialized" for an HloModuleProto.
    """
    return _compiler_ir.from_concrete_function(concrete)(stage=stage)
