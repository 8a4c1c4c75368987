"""Counts the FLOPs of a Pallas kernel from its code, because calls often do not state them.

A call of a kernel carries the code that a core runs at each point of the kernel's grid, in MLIR.
"""

import base64
import functools
import math
import operator
import re
from typing import Any

from tftpu.preflight.compiling.jax_internals import load_internals
from tftpu.preflight.program.hlo import Instruction

# Matches the contracted dimensions of a product's left operand.
_CONTRACTED = re.compile(r"dot_dimension_numbers<\[([\d, ]*)\]")
_ARITHMETIC = {"addi": operator.add, "subi": operator.sub, "muli": operator.mul}


class _UnknownError(Exception):
    """Raised if the number of runs of a product depends on data or on the place in the grid."""


def count_kernel_flops(instruction: Instruction) -> int | None:
    """Returns the FLOPs of a kernel's matrix products; None if its code does not show them.

    Of the branches of a condition, the one with more FLOPs counts. Kernels that skip blocks, as in
    causal attention, do less.

    Args:
        instruction: the call of the kernel.
    """
    body = instruction.match_attribute(r'"body":"([^"]*)"')
    return _count_body(body) if body else None


@functools.lru_cache(maxsize=256)
def _count_body(body: str) -> int | None:
    jax = load_internals()
    try:
        with jax.mlir.make_ir_context() as context:
            jax.mosaic.register_dialect(context)
            context.allow_unregistered_dialects = True
            module = jax.ir.Module.parse(base64.b64decode(body))
            return sum(_count_points(f) * _count_flops(f) for f in module.body.operations)
    except (_UnknownError, jax.ir.MLIRError):
        return None


def _count_points(function: Any) -> int:
    """Returns the number of points in the grid of a kernel; 1 for any other function."""
    if "iteration_bounds" not in function.attributes:
        return 1
    bounds = re.findall(r"-?\d+", str(function.attributes["iteration_bounds"]).partition(":")[2])
    if any(int(bound) < 0 for bound in bounds):
        raise _UnknownError
    return math.prod(int(bound) for bound in bounds)


def _count_flops(op: Any) -> int:
    """Returns the FLOPs of the products in one run of an operation."""
    name = op.operation.name
    if name.endswith("tpu.matmul"):
        return _count_product(op)
    inside = [
        sum(_count_flops(inner) for block in region for inner in block)
        for region in op.operation.regions
    ]
    if not any(inside):
        return 0
    if name.endswith("scf.if"):
        return max(inside)
    return sum(inside) * (_count_trips(op) if name.endswith(("scf.for", "scf.while")) else 1)


def _count_product(op: Any) -> int:
    left = op.operands[0].type.shape
    contracted = _CONTRACTED.search(str(op.attributes["dimension_numbers"]))
    if contracted is None:
        raise _UnknownError
    depth = math.prod(left[int(d)] for d in contracted[1].split(",") if d.strip())
    return 2 * math.prod(op.results[0].type.shape) * depth


def _count_trips(loop: Any) -> int:
    """Returns the trip count of a loop with constant bounds."""
    if loop.operation.name.endswith("scf.while"):
        raise _UnknownError
    start, end, step = (_read_constant(value) for value in list(loop.operands)[:3])
    return max(0, -(-(end - start) // step))


def _read_constant(value: Any) -> int:
    """Returns the value of a scalar that is computed from constants."""
    owner = value.owner  # an operation, or a block if the value is its argument
    kind = getattr(owner, "name", "").rpartition(".")[2]
    if kind == "constant":
        return int(str(owner.attributes["value"]).partition(":")[0])
    if kind not in _ARITHMETIC:
        raise _UnknownError
    return _ARITHMETIC[kind](*(_read_constant(operand) for operand in owner.operands))
