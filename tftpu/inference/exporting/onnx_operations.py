"""Converts operations of Keras layers that tf2onnx does not know to ONNX operations."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf


def list_handlers() -> dict[str, tuple[Callable[..., None], list[str]]]:
    """Returns the converters of operations by name, in the form that tf2onnx takes."""
    return {
        "Erfc": (_erfc, []),
        "Expm1": (_expm1, []),
        "Log1p": (_log1p, []),
        "Bucketize": (_bucketize, []),
    }


def flatten_function(function: Any) -> Any:
    """Returns an equivalent `tf.function` that calls no other function.

    Keras compiles some convolutions as separate functions, which the converter cannot convert.
    """

    def opened(*given: Any) -> Any:
        before = tf.config.functions_run_eagerly()
        # While this function is traced, the functions that it calls become part of it.
        tf.config.run_functions_eagerly(True)
        try:
            return function.python_function(*given)
        finally:
            tf.config.run_functions_eagerly(before)

    return tf.function(opened, input_signature=function.input_signature, autograph=False)


def store_constants(model: Any, function: Any) -> None:
    """Turns inputs of an ONNX model into constants if they are tensors that its function captured.

    Args:
        model: an `onnx.ModelProto`.
        function: the `tf.function` from which the model was converted. It captures the tensors of
            layers such as `Normalization`, which are not variables.

    Raises:
        ValueError: the function uses a lookup table.
    """
    from onnx import numpy_helper

    captures = function.get_concrete_function().graph.captures
    variables = {id(v.handle) for v in function.get_concrete_function().graph.variables}
    held = {inside.name: value for value, inside in captures if id(value) not in variables}
    if any(value.dtype == tf.resource for value in held.values()):
        raise ValueError(
            "a lookup in a table, as in IntegerLookup or StringLookup, has no ONNX operation"
        )
    inputs, used = list(model.graph.input), set(_read_by(model.graph))
    del model.graph.input[:]
    model.graph.input.extend(value for value in inputs if value.name not in held)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(held[value.name]), value.name)
        for value in inputs
        if value.name in held and value.name in used
    )


def _read_by(graph: Any) -> Iterator[str]:
    """Yields the names of the values that the nodes of a graph and its inner graphs read."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from _read_by(attribute.g)


def _erfc(graph: Any, node: Any, name: str, arguments: Any) -> None:
    one = _make_constant(graph, node, 1.0)
    erf = graph.make_node("Erf", [node.input[0]]).output[0]
    _replace(graph, node, "Sub", [one, erf])


def _expm1(graph: Any, node: Any, name: str, arguments: Any) -> None:
    one = _make_constant(graph, node, 1.0)
    exponential = graph.make_node("Exp", [node.input[0]]).output[0]
    _replace(graph, node, "Sub", [exponential, one])


def _log1p(graph: Any, node: Any, name: str, arguments: Any) -> None:
    more = graph.make_node("Add", [node.input[0], _make_constant(graph, node, 1.0)]).output[0]
    _replace(graph, node, "Log", [more])


def _bucketize(graph: Any, node: Any, name: str, arguments: Any) -> None:
    """Counts, for each value, the boundaries that are not above it."""
    boundaries = np.array(node.get_attr("boundaries").floats, np.float32)
    bounds = graph.make_const(f"{node.name}_bounds", boundaries).output[0]
    last = graph.make_const(f"{node.name}_last", np.array([-1], np.int64)).output[0]
    value = graph.make_node("Cast", [node.input[0]], attr={"to": 1}).output[0]  # dtype 1 is float32
    column = graph.make_node("Unsqueeze", [value, last]).output[0]
    reached = graph.make_node("GreaterOrEqual", [column, bounds]).output[0]
    counted = graph.make_node("Cast", [reached], attr={"to": 6}).output[0]  # dtype 6 is int32
    _replace(graph, node, "ReduceSum", [counted, last], attr={"keepdims": 0})


def _make_constant(graph: Any, node: Any, value: float) -> str:
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(node.output_dtypes[0])
    return graph.make_const(f"{node.name}_constant", np.array(value, dtype)).output[0]


def _replace(graph: Any, node: Any, operation: str, inputs: list[str], **more: Any) -> None:
    """Replaces a node by another operation."""
    shapes, dtypes = node.output_shapes, node.output_dtypes
    graph.remove_node(node.name)
    graph.make_node(
        operation, inputs, outputs=node.output, name=node.name, shapes=shapes, dtypes=dtypes, **more
    )
