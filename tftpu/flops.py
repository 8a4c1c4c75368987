"""The model FLOPs of a step: its matrix products, from the traced forward pass."""

import math
from collections.abc import Iterable

import tensorflow as tf

# Once forward, and backward once for the input and once for the weights.
PASSES = 3


def of_forward(ops: Iterable[tf.Operation]) -> int:
    """The floating-point operations of the matrix products and convolutions among ops.

    A multiplication and its addition count as two. What is elementwise is left out, as is usual
    for the utilisation of a chip (MFU; PaLM, arXiv:2204.02311, appendix B).
    """
    return sum(_flops(op) for op in ops)


def _flops(op: tf.Operation) -> int:
    shapes = [tensor.shape for tensor in op.inputs]
    if op.type == "Einsum":
        return _einsum(op.get_attr("equation").decode(), shapes)
    output = op.outputs[0].shape if op.outputs else None
    if output is None or not output.is_fully_defined():
        return 0
    if op.type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        name = "transpose_a" if op.type == "MatMul" else "adj_x"
        inner = shapes[0][-2] if op.get_attr(name) else shapes[0][-1]
        return 2 * output.num_elements() * inner
    if op.type in ("Conv2D", "Conv3D"):
        # Each output is a sum over the kernel and the input channels of its group.
        return 2 * output.num_elements() * math.prod(shapes[1][:-1])
    if op.type == "DepthwiseConv2dNative":
        return 2 * output.num_elements() * math.prod(shapes[1][:2])
    return 0


def _einsum(equation: str, shapes: list[tf.TensorShape]) -> int:
    """Twice the product of all its axes; an ellipsis stands for those that are not named."""
    terms = equation.partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes):
        if not shape.is_fully_defined():
            return 0
        left, dots, right = term.partition("...")
        middle = shape.rank - len(left) - len(right)
        names = [*left, *(f"...{middle - i}" for i in range(middle) if dots), *right]
        for name, size in zip(names, shape):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values()) if len(terms) > 1 else 0
