"""The private interfaces of Keras that the layers use, each behind one function.

Tested with Keras 3.15.1 by the tests of blocks, scanned blocks and adapters.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state, stateless_scope
from keras.src.models import functional

from tftpu.tensors import Tensor

_CALL_CONTEXT = "current_call_ctx"  # the global attribute for Keras's context of a layer call


def read_stored_value(variable: keras.Variable) -> Tensor:
    """Returns the stored value of a variable, without Keras's autocast to the compute dtype."""
    private: Any = variable
    scope: Any = stateless_scope.get_stateless_scope()
    value = scope.get_current_value(variable) if scope is not None else None
    if value is not None:
        return value
    read = variable.value  # initializes a variable whose initialization was deferred
    return read if private._value is None else private._value


def compute_dtypes(model: keras.Layer) -> dict[int, str]:
    """Returns the dtypes to which the layers of a model cast its variables, by id of the variable.

    Variables that no layer casts are left out.
    """
    found: dict[int, str] = {}
    for layer in flatten_layers(model):  # outer layers come first, so the innermost one decides
        if layer.autocast:
            found |= {id(v): layer.compute_dtype for v in layer.variables if v._autocast}
    return found


def flatten_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer, or a model, and all layers in it, outer ones first."""
    private: Any = layer
    return list(private._flatten_layers())


def list_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers of a layer or model."""
    private: Any = layer
    return list(private._flatten_layers(recursive=False, include_self=False))


def find_stored_matrix(layer: keras.Layer) -> keras.Variable:
    """Returns the variable of a layer's kernel or embeddings, without the LoRA update.

    A quantized layer has integers; those of 4 bits are packed, two to a byte.
    """
    private: Any = layer
    return private._embeddings if isinstance(layer, keras.layers.Embedding) else private._kernel


def replace_traced_value(variable: keras.Variable) -> bool:
    """Replaces a variable's value with zeros if JAX traces it, so that Keras can quantize it.

    A step that is only traced, for TPUs that this machine lacks, does not depend on the values.

    Returns:
        Whether the value was replaced.
    """
    if keras.config.backend() != "jax":
        return False
    from jax.core import Tracer

    private: Any = variable
    if not isinstance(private._value, Tracer):
        return False
    private._value = np.zeros(variable.shape, variable.dtype)
    return True


@contextlib.contextmanager
def becoming_quantized(layer: keras.Layer, floats: keras.Variable) -> Iterator[None]:
    """Lets a built layer replace the float variable `floats` by integer ones within the block.

    Keras itself deletes the attribute and then runs a garbage collection, which takes seconds in
    total for a model with many layers.
    """
    private: Any = layer
    private._untrack_variable(floats)
    private._tracker.unlock()
    try:
        yield
    finally:
        private._tracker.lock()
    private._is_quantized = True  # otherwise Keras would ask the layer to quantize itself


def count_rows_per_scale(layer: keras.Layer) -> int:
    """Returns how many rows of a 4-bit kernel share a scale; 0 means all."""
    rows = getattr(layer, "_int4_block_size", None) or 0
    return max(rows, 0)


def read_scale(layer: keras.layers.EinsumDense) -> Tensor:
    """Returns the scale of a layer's int8 kernel, in a shape that broadcasts with the kernel."""
    private: Any = layer
    return private._adjust_scale_for_dequant(layer.kernel_scale)


class GraphCall(NamedTuple):
    """The only call of an operation in the graph of a functional model.

    Attributes:
        operation: a layer or another operation.
        arguments: all arguments, by path; tensors are symbolic. The path of a positional argument
            begins with 0 and its position, that of a keyword argument with 1 and its name.
        outputs: the symbolic outputs.
    """

    operation: Any
    arguments: dict[tuple[Any, ...], Any]
    outputs: list[Any]


def read_calls(model: keras.Model) -> list[GraphCall]:
    """Returns the calls in the graphs of a model and its nested models, in execution order.

    Operations that are called several times are left out.
    """
    found = []
    for graph in flatten_layers(model):
        if isinstance(graph, functional.Functional):
            nodes = list_nodes(graph)
            operations = [id(node.operation) for node in nodes]
            for node in nodes:
                if operations.count(id(node.operation)) == 1:
                    given = node.arguments.args, node.arguments.kwargs
                    arguments = dict(keras.tree.flatten_with_path(given))
                    found.append(GraphCall(node.operation, arguments, list(node.outputs)))
    return found


def find_graph(layer: Any) -> Any:
    """Returns the graph of a functional or sequential model; None if a layer is neither."""
    graph = getattr(layer, "_functional", layer)
    return graph if isinstance(graph, functional.Functional) else None


def list_nodes(graph: Any) -> list[Any]:
    """Returns the calls in a graph in the order in which Keras computes them.

    Each has an `operation`, and `input_tensors` and `outputs`, lists of symbolic tensors.
    """
    return [
        node
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
        if node.operation and not node.is_input
    ]


@contextlib.contextmanager
def replacing_graphs(replacements: Mapping[int, Callable[..., None]]) -> Iterator[None]:
    """Runs functions in place of some functional graphs within the block, in all threads.

    Args:
        replacements: by the id of a graph, a function `replace(values, run)`. It receives the
            values of the graph's inputs, by the ids of the symbolic tensors, and adds the values of
            the outputs. `run(nodes, values)` computes nodes and adds their outputs to `values`.
    """
    original: Any = functional.Functional._run_through_graph

    @functools.wraps(original)
    def run_graph(self: Any, inputs: Any, operation_fn: Any = lambda op: op, **given: Any) -> Any:
        replacement = replacements.get(id(self))
        if replacement is None:
            return original(self, inputs, operation_fn, **given)

        def run(nodes: Iterable[Any], values: dict[int, Any]) -> None:
            for node in nodes:
                args, kwargs = node.arguments.fill_in(values)
                found = keras.tree.flatten(operation_fn(node.operation)(*args, **kwargs))
                values.update(zip(map(id, node.outputs), found))

        values = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs)))
        replacement(values, run)
        outputs = [values[id(tensor)] for tensor in self.outputs]
        return keras.tree.pack_sequence_as(self._outputs_struct, outputs)

    private: Any = functional.Functional
    before = vars(private).get("_run_through_graph")  # None: the class inherits it
    private._run_through_graph = run_graph
    try:
        yield
    finally:
        del private._run_through_graph
        if before is not None:
            private._run_through_graph = before


# Attributes that `compile` adds to a model.
_OF_COMPILED = "optimizer", "stop_training", "_compile_config", "_compiled_trainable_state"


def read_settings(layer: keras.Layer) -> dict[str, Any]:
    """Returns the attributes of a layer beyond those that every Keras layer, or model, has."""
    base = keras.Model if isinstance(layer, keras.Model) else keras.layers.Layer
    every = {*vars(base()), *_OF_COMPILED}
    own = {name: value for name, value in vars(layer).items() if name not in every}
    # TensorFlow adds attributes that begin with `_self_`, for checkpoints.
    return {name: value for name, value in own.items() if not name.startswith("_self_")}


@contextlib.contextmanager
def replacing_calls(replacements: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Calls a function in place of some layers within the block, in all threads.

    Args:
        replacements: by the id of a layer, a function whose arguments are Keras's own
            `Layer.__call__` and the arguments of the call, without the layer.
    """
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replacement = replacements.get(id(self))
        if replacement is None:
            return original(self, *args, **kwargs)
        return replacement(original, *args, **kwargs)

    keras.layers.Layer.__call__ = call
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = original


def read_call_context() -> Any:
    """Returns the context that Keras passes to nested layer calls, such as their `training`."""
    return global_state.get_global_attribute(_CALL_CONTEXT)


@contextlib.contextmanager
def entering_call(context: Any) -> Iterator[None]:
    """Runs the block in a call context that `read_call_context` returned."""
    before = read_call_context()
    global_state.set_global_attribute(_CALL_CONTEXT, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CALL_CONTEXT, before)


def read_mask(tensor: Tensor) -> Tensor | None:
    """Returns the mask that Keras passes along with a tensor, or None."""
    return backend.get_keras_mask(tensor)


def attach_mask(tensor: Tensor, mask: Tensor | None) -> None:
    """Attaches a mask to a tensor, which Keras passes along; None attaches nothing."""
    if mask is not None:
        backend.set_keras_mask(tensor, mask)
