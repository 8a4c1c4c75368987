"""Lifetimes of the arrays that a compiled program keeps in HBM.

A compiled program is scheduled: its instructions run in the order of the text. An array lives from
the instruction that makes it to the last one that reads it. Several values may share one array:
those that instructions such as `bitcast` and `tuple` only pass on; the state of a loop and what its
body returns; an output in the memory of an argument; and what an instruction computes in place,
which the compiler records in its `aliasing_operands`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tftpu.preflight.program.hlo import Computation, Instruction, Module, Tensor
from tftpu.preflight.program.loops import Runs

_PASSED_ON = ("tuple", "bitcast", "opt-barrier", "optimization-barrier", "get-tuple-element")
_NOT_RUN = (*_PASSED_ON, "parameter", "constant", "after-all", "while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in HBM.

    Attributes:
        tensor: its shape.
        bytes: size with padding.
        first, last: places in program order of its first and last instruction.
        names: names of the instructions that write to it, in program order.
    """

    tensor: Tensor
    bytes: int
    first: int
    last: int
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An outermost loop.

    Attributes:
        first, last: places in program order of the first and last instruction of its body; in a
            memory curve, the indices of their points.
        times: its trip count, None if the program does not show it.
    """

    first: int
    last: int
    times: int | None


class Lifetimes:
    """The arrays of a program, and when each of them lives.

    The arguments and outputs of the program are excluded, as their memory is used throughout.

    Args:
        module: the program.

    Attributes:
        order: the instructions that run, in program order. The body of a loop replaces the loop,
            once; branches of a conditional follow each other.
        loops: the outermost loops.
        arrays: all arrays in HBM; constants live throughout.
    """

    def __init__(self, module: Module):
        self.order: list[Instruction] = []
        self.loops: list[Loop] = []
        self._module, self._runs = module, Runs(module)
        self._made: list[_Leaf] = []
        for leaf in self._walk(module.entry, None):
            leaf.top.resident = True
        self.arrays = list(self._iterate_arrays())

    def _iterate_arrays(self) -> Iterator[Array]:
        """Yields each array once, though several values may share it."""
        names: dict[int, list[str]] = {}
        for leaf in self._made:
            names.setdefault(id(leaf.top), []).append(leaf.maker.name)
        end = len(self.order) - 1
        for leaf in self._made:
            if leaf.top is not leaf or leaf.resident or not leaf.bytes:
                continue
            constant = leaf.maker.opcode == "constant"
            first, last = (0, end) if constant else (leaf.first, min(leaf.last, end))
            yield Array(leaf.tensor, leaf.bytes, first, last, tuple(names[id(leaf)]))

    def _walk(
        self, computation: Computation, given: "list[list[_Leaf]] | None", nested: bool = False
    ) -> "list[_Leaf]":
        """Follows the arrays through a computation; returns the arrays of its result.

        Args:
            computation: the computation to follow.
            given: arrays of its parameters; None at the entry of the program.
            nested: whether a loop contains it.
        """
        values: dict[str, _Value] = {}
        result: list[_Leaf] = []
        for name, instruction in computation.items():
            operands = [values[n] for n in instruction.operands if n in values]
            if instruction.opcode not in _PASSED_ON:
                self._read((x for o in operands for x in o.leaves), len(self.order))
            if instruction.opcode == "parameter":
                values[name] = self._visit_parameter(instruction, given)
            elif instruction.opcode == "while":
                values[name] = self._visit_loop(instruction, computation, operands, nested)
            elif instruction.opcode in ("call", "conditional"):
                values[name] = self._visit_calls(instruction, operands, nested)
            else:
                values[name] = self._visit_value(instruction, operands)
            if instruction.opcode not in _NOT_RUN:
                self.order.append(instruction)
            if instruction.root:
                result = values[name].leaves
        self._read(result, len(self.order) - 1)
        return result

    def _read(self, leaves: "Iterable[_Leaf]", place: int) -> None:
        for leaf in leaves:
            leaf.top.last = max(leaf.top.last, place)

    def _visit_parameter(
        self, instruction: Instruction, given: "list[list[_Leaf]] | None"
    ) -> "_Value":
        if given is not None:
            return _Value(given[int(instruction.argument)])
        leaves = self._create_value(instruction, instruction.shape)
        for leaf in leaves:
            leaf.resident = True
        return _Value(leaves)

    def _visit_loop(
        self,
        loop: Instruction,
        computation: Computation,
        operands: "list[_Value]",
        nested: bool,
    ) -> "_Value":
        state = [leaf for operand in operands for leaf in operand.leaves]
        body = self._module.computations[loop.match_attribute(r"body=%?([\w.-]+)")]
        first = len(self.order)
        for leaf, returned in zip(state, self._walk(body, [state], nested=True)):
            leaf.merge(returned)
        if not nested:
            times = self._runs.count_trips(loop, computation)
            self.loops.append(Loop(first, len(self.order) - 1, times))
        return _Value(state)

    def _visit_calls(
        self, instruction: Instruction, operands: "list[_Value]", nested: bool
    ) -> "_Value":
        """Returns the arrays of a call, or of a conditional, whose branches share their result."""
        given = [operand.leaves for operand in operands]
        if instruction.opcode == "call":
            return _Value(
                self._walk(self._module.computations[instruction.called[0]], given, nested)
            )
        results = [
            self._walk(self._module.computations[name], [leaves], nested)
            for name, leaves in zip(instruction.called, given[1:])
        ]
        for other in results[1:]:
            for leaf, same in zip(results[0], other):
                leaf.merge(same)
        return _Value(results[0])

    def _visit_value(self, instruction: Instruction, operands: "list[_Value]") -> "_Value":
        """Returns the arrays of any instruction but a parameter, loop, call or conditional."""
        flat = [leaf for operand in operands for leaf in operand.leaves]
        opcode, shape = instruction.opcode, instruction.shape
        if opcode == "get-tuple-element":
            index = int(instruction.match_attribute(r"index=(\d+)") or 0)
            return _Value(flat[index : index + len(shape)])
        if opcode in _PASSED_ON:
            return _Value(flat)
        if opcode == "async-update":
            return self._visit_updated(instruction, operands)
        if opcode.endswith("-done"):
            start = operands[0]
            found = start.leaves[start.result :][: len(shape)]
            return _Value([*found, *self._create_value(instruction, shape[len(found) :])])
        if opcode == "copy-start":  # the results are (destination, source, context)
            made = self._create_value(instruction, [shape[0], *shape[2:]])
            return _Value([made[0], *flat[:1], *made[1:]])
        if opcode == "send" or (opcode.endswith("-start") and len(shape) > len(flat)):
            # The results of these instructions begin with the operands.
            passed = flat[:1] if opcode == "send" else flat
            made = self._create_value(instruction, shape[len(passed) :])
            return _Value([*passed, *made], 0 if opcode == "send" else len(passed))
        made = self._create_value(instruction, shape)
        for group in _find_in_place(instruction, [operand.leaves for operand in operands], made):
            for one, other in itertools.pairwise(group):
                one.merge(other)
        return _Value(made)

    def _visit_updated(self, instruction: Instruction, operands: "list[_Value]") -> "_Value":
        """Returns the arrays of an `async-update`: (operands, result, context).

        An update with operands begins the work and creates the result, but shares the context
        with its `async-start`, as the aliases of the update show.
        """
        given = [leaf for operand in operands[1:] for leaf in operand.leaves]
        if not given:
            return operands[0]
        context = operands[0].leaves[: instruction.rest.count(": (0, {2,")]
        shape = instruction.shape[len(given) : len(instruction.shape) - len(context)]
        return _Value([*given, *self._create_value(instruction, shape), *context], len(given))

    def _create_value(self, instruction: Instruction, shape: list[Tensor]) -> "list[_Leaf]":
        here = len(self.order)
        leaves = [_Leaf(instruction, tensor, here, here) for tensor in shape]
        self._made += leaves
        return leaves


class _Value(NamedTuple):
    """The arrays of an instruction's result: one, or those of a tuple in its order.

    Attributes:
        leaves: the arrays.
        result: index of the first array that a matching "…-done" returns.
    """

    leaves: "list[_Leaf]"
    result: int = 0


class _Leaf:
    """One array of a value; all leaves that share memory have the same `top`.

    Args:
        maker: the instruction that creates it.
        tensor: the shape.
        first, last: places in program order of the first and last instruction.
    """

    def __init__(self, maker: Instruction, tensor: Tensor, first: int, last: int):
        self.maker, self.tensor, self.first, self.last = maker, tensor, first, last
        self.bytes = 0 if tensor.on_chip else tensor.padded_bytes
        self.resident = False
        self._above: _Leaf | None = None

    @property
    def top(self) -> "_Leaf":
        """The largest of the leaves that share an array, which represents them."""
        leaf = self
        while leaf._above is not None:
            leaf = leaf._above
        return leaf

    def merge(self, other: "_Leaf") -> None:
        """Makes two leaves share one array, which lives as long as either."""
        top, under = sorted((self.top, other.top), key=lambda leaf: -leaf.bytes)
        if top is not under:
            under._above = top
            top.first, top.last = min(top.first, under.first), max(top.last, under.last)
            top.resident |= under.resident


def _find_in_place(
    instruction: Instruction, operands: list[list[_Leaf]], made: list[_Leaf]
) -> Iterator[list[_Leaf]]:
    """Yields lists of the operands and results that an instruction keeps in one array."""
    both = [leaf for leaves in operands for leaf in leaves] + made
    for indices in re.findall(r'\{"indices":\[([^\]]*)\]\}', instruction.rest):
        places = [int(place) for place in re.findall(r"\d+", indices)]
        yield [both[place] for place in places if place < len(both) and both[place].bytes]
    aliases = instruction.match_attribute(r"output_to_operand_aliasing=\{(.*?\)\s*)\}")
    for output, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", aliases):
        if int(operand) < len(operands) and len(operands[int(operand)]) == 1:
            yield [made[int(output or 0)], operands[int(operand)][0]]
    if instruction.opcode == "dynamic-update-slice":
        yield [made[0], operands[0][0]]
