"""Integer weights of ONNX models, which nodes of the model convert to floats.

These nodes are plain arithmetic, which ONNX Runtime computes once, when it loads the model. They do
not use `DequantizeLinear`, because ONNX Runtime fuses it with the next matrix product into a node
that also rounds the activations to 8 bits: outputs were off by 4e-3 (ONNX Runtime 1.24).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tftpu.inference.exporting.serving import format_weight_name
from tftpu.inference.quantizing import Quantized


def convert_to_integers(model: Any, weights: Sequence[Quantized]) -> Any:
    """Changes a model to store weights as integers instead of taking them as inputs; returns it.

    Args:
        model: an `onnx.ModelProto` whose last inputs are the weights in float32, as for
            `Serving.open_function`.
        weights: the quantized weights, in the order of the inputs.
    """
    graph = model.graph
    added = _Added(graph)
    for number, weight in enumerate(weights):
        added.add_floats(format_weight_name(number), weight)
    inputs = {format_weight_name(number) for number in range(len(weights))}
    kept = [value for value in graph.input if value.name not in inputs]
    nodes = [*added.nodes, *graph.node]
    for field, values in ((graph.input, kept), (graph.node, nodes)):
        del field[:]
        field.extend(values)
    _shorten_names(graph)
    return model


def _shorten_names(graph: Any) -> None:
    """Renames values to "v0", "v1", ...: long names are a tenth of a small 4-bit model's file."""
    fixed = {value.name for value in (*graph.input, *graph.output)} | {""}
    made = [name for node in graph.node for name in node.output]
    inside = [name for name in (*(i.name for i in graph.initializer), *made) if name not in fixed]
    short = {name: f"v{number}" for number, name in enumerate(dict.fromkeys(inside))}
    for tensor in graph.initializer:
        tensor.name = short[tensor.name]
    for node in graph.node:
        node.name = ""
        node.input[:] = [short.get(name, name) for name in node.input]
        node.output[:] = [short.get(name, name) for name in node.output]
    del graph.value_info[:]


class _Added:
    """The nodes and stored values that are added to a graph."""

    def __init__(self, graph: Any):
        self._graph = graph
        self._known: set[str] = set()
        self.nodes: list[Any] = []

    def add_floats(self, name: str, weight: Quantized) -> None:
        """Adds a weight as integers, and nodes that convert it to a float value called `name`."""
        from onnx import TensorProto

        def add_node(kind: str, step: str, *inputs: str, **attributes: Any) -> str:
            return self._add_node(kind, f"{name}/{step}", *inputs, **attributes)

        if weight.bits == 8:
            codes = self._add_array(f"{name}/integers", weight.codes)
            codes = add_node("Cast", "floats", codes, to=TensorProto.FLOAT)
        else:
            packed = self._add_array(f"{name}/integers", weight.packed[:, None])
            lower = add_node(
                "BitwiseAnd", "lower", packed, self._share_constant("15", np.uint8(15))
            )
            upper = self._share_constant("4", np.uint8(4))
            upper = add_node("BitShift", "upper", packed, upper, direction="RIGHT")
            pairs = add_node("Concat", "pairs", lower, upper, axis=1)
            flat = add_node("Reshape", "flat", pairs, self._share_constant("all", np.array([-1])))
            ends = [
                self._share_constant("0", np.array([0])),
                self._add_array(f"{name}/size", _build_size_array(weight)),
            ]
            flat = add_node("Slice", "sliced", flat, *ends)
            shape = self._add_array(f"{name}/shape", np.array(weight.codes.shape, np.int64))
            shaped = add_node("Reshape", "shaped", flat, shape)
            raised = add_node("Cast", "floats", shaped, to=TensorProto.FLOAT)
            codes = add_node("Sub", "codes", raised, self._share_constant("8", np.float32(8)))
        scale = self._add_array(f"{name}/scale", weight.scale)
        if weight.codes.shape == weight.shape:
            self._add_node("Mul", name, codes, scale)
            return
        scaled = add_node("Mul", "scaled", codes, scale)
        whole = self._add_array(f"{name}/whole", np.array(weight.shape, np.int64))
        self._add_node("Reshape", name, scaled, whole)

    def _add_node(self, kind: str, output: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _add_array(self, name: str, value: Any) -> str:
        from onnx import numpy_helper

        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _share_constant(self, name: str, value: Any) -> str:
        """Adds a constant, unless an earlier weight did; returns its name."""
        name = f"integers/{name}"
        if name not in self._known:
            self._known.add(name)
            self._add_array(name, value)
        return name


def _build_size_array(weight: Quantized) -> np.ndarray:
    return np.array([weight.codes.size], np.int64)
