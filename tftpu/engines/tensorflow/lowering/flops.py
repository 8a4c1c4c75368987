"""Counts the model FLOPs of a step: those of its matrix products, from the traced forward pass."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tftpu.engines.origins import (
    Origin,
    count_passes,
    find_argument_origins,
    merge_origins,
    stopped,
)
from tftpu.engines.tensorflow import internals

Shape = Any  # a tf.TensorShape that is fully defined
# Operations that call only one of their functions.
_CHOICES = ("If", "StatelessIf", "Case", "StatelessCase")


def count_step_flops(graph: Any, origins: Sequence[Origin]) -> int:
    """Returns the FLOPs of a step's products, forward and backward, from its forward pass.

    A multiply-add counts as two FLOPs. Elementwise ops do not count, nor do batched products of
    activations with activations, as in attention. This gives 6 x parameters x tokens for a fully
    trained transformer (`tftpu.engines.origins`). Ops that no output depends on do not count, for
    example a recurrent step that Keras runs only for its shapes. A loop with an unknown number of
    iterations counts once. Of several branches, only the largest counts.

    Args:
        graph: the `FuncGraph` of the forward pass, with static shapes.
        origins: the origin of each input of the graph.
    """
    return _count_graph(graph, origins)[0]


def _count_graph(graph: Any, given: Sequence[Origin]) -> tuple[int, list[Origin]]:
    """Returns the FLOPs of a graph, and the origin of each of its outputs."""
    known = internals.list_functions(graph)
    origins = {tensor.name: origin for tensor, origin in zip(graph.inputs, given)}
    total = 0
    for op in _find_needed(graph):
        inputs = [origins.get(tensor.name, Origin.NONE) for tensor in op.inputs]
        bodies = internals.list_called_functions(known, op)
        if bodies:
            flops, outputs = _count_called(op, bodies, inputs)
            total += _count_trips(op, known) * flops
        elif op.type in ("Placeholder", "PlaceholderWithDefault"):
            continue  # an input: its origin is given
        else:
            if len(inputs) > 1:
                total += count_passes(*inputs[-2:], batched=_is_batched(op)) * _count_flops(op)
            # Random numbers count as data, whatever their seed depends on.
            origin = Origin.DATA if "Random" in op.type else merge_origins(inputs)
            outputs = [origin] * len(op.outputs)
        for tensor, origin in zip(op.outputs, outputs):
            flows = op.type != "StopGradient" and _is_differentiable(tensor)
            origins[tensor.name] = origin if flows else stopped(origin)
    return total, [origins.get(tensor.name, Origin.NONE) for tensor in graph.outputs]


def _count_called(
    op: tf.Operation, bodies: list[Any], inputs: list[Origin]
) -> tuple[int, list[Origin]]:
    """Returns the FLOPs of the functions that an op calls, and the origin of each op output."""
    while True:
        found = [
            _count_graph(body, find_argument_origins(inputs, len(body.inputs))) for body in bodies
        ]
        results = [outputs for _, outputs in found if len(outputs) == len(op.outputs)]
        outputs = [merge_origins(origins) for origins in zip(*results)]
        # The outputs of one iteration are the inputs of the next.
        after = [a | b for a, b in zip(inputs, outputs)] if "While" in op.type else inputs
        if after == inputs:
            counts = [flops for flops, _ in found]
            total = max(counts) if op.type in _CHOICES else sum(counts)
            return total, outputs or [merge_origins(inputs)] * len(op.outputs)
        inputs = after


def _find_needed(graph: Any) -> list[tf.Operation]:
    """Returns the ops that the outputs of a graph depend on, each after the ops it depends on."""
    found: set[str] = set()
    todo = [tensor.op for tensor in graph.outputs]
    while todo:
        op = todo.pop()
        if op.name not in found:
            found.add(op.name)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op.name in found]


def _is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient may flow through a tensor: floats, a tensor list or variable."""
    return tensor.dtype.is_floating or tensor.dtype in (tf.variant, tf.resource)


def _count_trips(op: tf.Operation, known: dict[str, Any]) -> int:
    """Returns how often an op runs each function that it calls: 1, or the iterations of a loop.

    The iterations are known if the condition is `counter < limit`, and the counter's start, its
    increment and the limit are constants. Any other loop counts once.
    """
    if op.type not in ("While", "StatelessWhile"):
        return 1
    condition, body = (internals.find_function(op.get_attr(a), known) for a in ("cond", "body"))
    tests = condition.get_operations()
    if any(test.type in ("LogicalOr", "LogicalNot") for test in tests):
        return 1
    counts = []
    for test in tests:
        if test.type != "Less":
            continue
        counter, bound = test.inputs
        step = _find_increment(body, _find_input(counter, condition))
        start, limit = (_read_number(tensor, condition, op) for tensor in (counter, bound))
        if step and start is not None and limit is not None:
            counts.append(max(0, -(-(limit - start) // step)))
    return min(counts, default=1)


def _find_input(tensor: Any, graph: Any) -> int | None:
    """Returns the index of a tensor among the inputs of a graph, or None."""
    return next((i for i, given in enumerate(graph.inputs) if given is tensor), None)


def _find_increment(body: Any, place: int | None) -> int:
    """Returns the constant that a loop's body adds to one of its inputs, or 0."""
    value = None if place is None else body.outputs[place]
    while value is not None and value.op.type == "Identity":
        value = value.op.inputs[0]
    if value is None or value.op.type not in ("Add", "AddV2"):
        return 0
    sides = list(value.op.inputs)
    added = [_read_constant(side) for side in sides if side is not body.inputs[place]]
    return max(added[0] or 0, 0) if len(added) == 1 else 0


def _read_number(tensor: Any, condition: Any, loop: tf.Operation) -> int | None:
    """Returns the integer that `tensor` has when a loop's condition first runs; None if unknown."""
    place = _find_input(tensor, condition)
    return _read_constant(tensor if place is None else loop.inputs[place])


def _read_constant(tensor: Any) -> int | None:
    """Returns the value of a constant integer scalar; None for any other tensor."""
    found = (
        tf.get_static_value(tensor) if tensor.dtype.is_integer and not tensor.shape.rank else None
    )
    return None if found is None else int(found)


def _is_batched(op: tf.Operation) -> bool:
    """Returns whether an op is a product whose operands and result have a common axis."""
    if op.type == "Einsum":
        inputs, _, output = op.get_attr("equation").decode().partition("->")
        return bool(set.intersection(*map(set, inputs.split(","))) & set(output) - {"."})
    return "MatMul" in op.type and all((tensor.shape.rank or 0) > 2 for tensor in op.inputs)


def _count_flops(op: tf.Operation) -> int:
    shapes: list[Shape] = [tensor.shape for tensor in op.inputs]
    if op.type == "Einsum":
        return _count_einsum(op.get_attr("equation").decode(), shapes)
    output: Shape = op.outputs[0].shape if op.outputs else None
    if output is None or not output.is_fully_defined():
        return 0
    if op.type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        name = "transpose_a" if op.type == "MatMul" else "adj_x"
        inner = shapes[0][-2] if op.get_attr(name) else shapes[0][-1]
        return 2 * output.num_elements() * inner
    if op.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        # Each output is a sum over the kernel's window and the input channels of its group.
        channels = 1 if op.type == "DepthwiseConv2dNative" else shapes[1][-2]
        features = output[_choose_axes(op, output.rank).channels]
        return 2 * output[0] * _count_taps(shapes[0], output, shapes[1], op) * channels * features
    if op.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
        # As many products as a convolution from this op's output to its input.
        _, kernel, given = shapes
        return 2 * given[0] * _count_taps(output, given, kernel, op) * kernel[-2] * kernel[-1]
    return 0


class _Axes(NamedTuple):
    """The axes of a batch of images; axis 0 is the batch."""

    channels: int
    spatial: range


def _choose_axes(op: tf.Operation, rank: int) -> _Axes:
    first = op.get_attr("data_format").startswith(b"NC")
    return _Axes(1, range(2, rank)) if first else _Axes(rank - 1, range(1, rank - 1))


def _count_taps(given: Shape, output: Shape, kernel: Shape, op: tf.Operation) -> int:
    """Counts the products of one channel of a kernel with the pixels of an image, not padding."""
    return math.prod(
        _count_taps_along(given[axis], output[axis], size, op, axis)
        for axis, size in zip(_choose_axes(op, output.rank).spatial, kernel)
    )


def _count_taps_along(size: int, outputs: int, kernel: int, op: tf.Operation, axis: int) -> int:
    """Counts, along one axis, the pairs of output and kernel positions that read no padding."""
    stride, dilation = op.get_attr("strides")[axis], op.get_attr("dilations")[axis]
    reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1
    before = max(reach - size, 0) // 2 if op.get_attr("padding") == b"SAME" else 0
    places = (o * stride + k * dilation - before for o in range(outputs) for k in range(kernel))
    return sum(0 <= place < size for place in places)


def _count_einsum(equation: str, shapes: Sequence[Shape]) -> int:
    """Returns the FLOPs of an einsum of two operands; 0 for others.

    The FLOPs are twice the product of the sizes of all axes, including the axes of an ellipsis.
    """
    inputs = equation.partition("->")[0]
    terms = inputs.split(",")
    if len(terms) != 2:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes):
        if not shape.is_fully_defined():
            return 0
        left, dots, right = term.partition("...")
        middle = shape.rank - len(left) - len(right)
        names = [*left, *(f"...{middle - i}" for i in range(middle) if dots), *right]
        for name, size in zip(names, shape):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values())
