"""How often the instructions of a program run: the trip counts of its loops.

The body and the condition of a loop take its state, a tuple. Its trip count is the compiler's own,
if it recorded one. Otherwise the condition compares a counter, which the body increases by a
constant, with a bound. Both may come from another loop, as the bound of a backward pass does from
the counter of the forward pass, and the comparison may be in a computation that the condition
calls.
"""

import re
from collections.abc import Iterator

from tftpu.preflight.program.hlo import Computation, Instruction, Module

_SAME = ("copy", "convert", "bitcast", "reshape", "optimization-barrier")
Place = tuple[Instruction, Computation]  # an instruction, and the computation that contains it


class Runs:
    """The instructions of a program, and how often each runs.

    Args:
        module: the program.
    """

    def __init__(self, module: Module):
        self._module = module
        self._loops: dict[int, Place] = {}  # each loop, by the identity of its body
        for computation in module.computations.values():
            for instruction in computation.values():
                if instruction.opcode == "while":
                    self._loops[id(self._find_part(instruction, "body"))] = instruction, computation

    def iterate(
        self, computation: Computation | None = None, times: int = 1
    ) -> Iterator[tuple[Instruction, int, Computation]]:
        """Yields (instruction, number of runs, its computation) for every instruction that runs.

        Visits the bodies of loops, and the longest branch of a conditional, but not the bodies of
        fusions, which run as one instruction. A loop of unknown trip count counts once.

        Args:
            computation: where to start; None starts at the entry.
            times: number of runs of that computation.
        """
        computation = self._module.entry if computation is None else computation
        for instruction in computation.values():
            if instruction.opcode in ("while", "call", "conditional"):
                inside = times * (self.count_trips(instruction, computation) or 1)
                bodies = [self._module.computations[name] for name in instruction.called]
                if instruction.opcode == "conditional":
                    bodies = [max(bodies, key=self._count_cycles)]
                for body in bodies:
                    yield from self.iterate(body, inside)
            else:
                yield instruction, times, computation

    def _count_cycles(self, computation: Computation) -> int:
        return sum(times * (found.cycles or 0) for found, times, _ in self.iterate(computation))

    def list_uncounted(self) -> list[str]:
        """Returns the names of the loops whose trip count the program does not show."""
        return [
            instruction.name
            for computation in self._module.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "while" and self.count_trips(instruction, computation) is None
        ]

    def count_trips(self, loop: Instruction, computation: Computation) -> int | None:
        """Returns the trip count of a loop; None if it is unknown; 1 for other instructions.

        Args:
            loop: the instruction.
            computation: the computation that contains it.
        """
        if loop.opcode != "while":
            return 1
        if known := loop.match_attribute(r'"known_trip_count":\{"n":"?(\d+)'):
            return int(known)
        counts = []
        for counter, bound, extra in self._iterate_comparisons(
            self._find_part(loop, "condition"), ()
        ):
            step, start = self._step(loop, counter), self._find_initial(loop, computation, counter)
            limit = (
                bound if isinstance(bound, int) else self._find_kept(loop, computation, bound[0])
            )
            if step and start is not None and limit is not None:
                counts.append(max(0, -(-(limit + extra - start) // step)))
        return min(counts, default=None)

    def _find_part(self, loop: Instruction, part: str) -> Computation:
        return self._module.computations[loop.match_attribute(rf"{part}=%?([\w.-]+)")]

    def _iterate_comparisons(
        self, condition: Computation, calls: tuple[Place, ...]
    ) -> Iterator[tuple[int, int | tuple[int], int]]:
        """Yields the comparisons that must hold for a loop to continue.

        Each item has the counter's index in the state; the bound, as a number or a tuple with its
        index in the state; and 1 if the loop also runs with the counter at the bound, else 0.

        Args:
            condition: the condition of the loop, or a computation that it calls.
            calls: the calls that lead from the loop's condition to this computation.
        """
        if any(instruction.opcode in ("or", "not", "xor") for instruction in condition.values()):
            return
        for test in condition.values():
            operators = re.search(r"direction=(LT|LE|GT|GE)", test.rest)
            if test.opcode == "compare" and operators:
                sides = [self._trace_scalar(name, condition, calls) for name in test.operands]
                counter, bound = sides if operators[1][0] == "L" else sides[::-1]
                if isinstance(counter, tuple) and bound is not None:
                    yield counter[0], bound, int(operators[1][1] == "E")
            for name in test.called if test.opcode in ("call", "fusion") else ():
                place = test, condition
                yield from self._iterate_comparisons(
                    self._module.computations[name], (*calls, place)
                )

    def _trace_scalar(
        self, name: str, computation: Computation, calls: tuple[Place, ...]
    ) -> int | tuple[int] | None:
        """Traces a scalar in a loop's condition, or in a computation that it calls.

        Returns the number, or a tuple with the index in the loop's state, or None.
        """
        found = computation[name]
        while found.opcode in _SAME or found.opcode == "parameter":
            if found.opcode == "parameter":
                if not calls:  # the loop's state is a single scalar
                    return None
                caller, computation = calls[-1]
                calls = calls[:-1]
                found = computation[caller.operands[int(found.argument)]]
            else:
                found = computation[found.operands[0]]
        if found.opcode == "get-tuple-element":
            return (_index(found),)
        return _read_constant(found)

    def _step(self, loop: Instruction, index: int) -> int | None:
        """Returns the number above 0 that a loop adds to element `index` of its state, or None."""
        body = self._find_part(loop, "body")
        value, step = _find_result(body, index), 0
        while value is not None and value.opcode in ("add", *_SAME):
            operands = [body[name] for name in value.operands if name in body]
            steps = [_find_added(operand, body) for operand in operands]
            step += sum(added for added in steps if added is not None)
            value = next((one for one, added in zip(operands, steps) if added is None), None)
        return step if step > 0 and _is_element(value, index, body) else None

    def _find_kept(self, loop: Instruction, computation: Computation, index: int) -> int | None:
        """Returns element `index` of a loop's state if the body does not change it, else None."""
        body = self._find_part(loop, "body")
        value = _find_result(body, index)
        while value is not None and value.opcode in _SAME:
            value = body.get(value.operands[0])
        if not _is_element(value, index, body):
            return None
        return self._find_initial(loop, computation, index)

    def _find_initial(self, loop: Instruction, computation: Computation, index: int) -> int | None:
        """Returns the initial value of element `index` of a loop's state; None if unknown."""
        state = computation[loop.operands[0]]
        if state.opcode == "tuple":
            return self._read_number(computation[state.operands[index]], computation)
        return self._find_element(state, computation, index)

    def _read_number(self, value: Instruction, computation: Computation) -> int | None:
        """Returns the value of a scalar; None if it is unknown."""
        while value.opcode in _SAME:
            value = computation[value.operands[0]]
        if value.opcode != "get-tuple-element":
            return _read_constant(value)
        source = computation[value.operands[0]]
        return self._find_element(source, computation, _index(value))

    def _find_element(
        self, source: Instruction, computation: Computation, index: int
    ) -> int | None:
        """Returns element `index` of a loop's result, or of its state if constant; else None."""
        if source.opcode == "parameter" and id(computation) in self._loops:
            loop, outside = self._loops[id(computation)]
            return self._find_kept(loop, outside, index)
        if source.opcode != "while":
            return None
        kept = self._find_kept(source, computation, index)
        if kept is not None:
            return kept
        step, start = self._step(source, index), self._find_initial(source, computation, index)
        trips = self.count_trips(source, computation)
        return None if step is None or start is None or trips is None else start + step * trips


def _find_result(computation: Computation, index: int) -> Instruction | None:
    """Returns the instruction that computes element `index` of a computation's result, a tuple."""
    root = _find_root(computation)
    return computation.get(root.operands[index]) if root.opcode == "tuple" else None


def _find_root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


def _index(element: Instruction) -> int:
    """Returns the index that a `get-tuple-element` selects."""
    return int(element.match_attribute(r"index=(\d+)") or 0)


def _is_element(value: Instruction | None, index: int, body: Computation) -> bool:
    """Returns whether a value of a loop's body is the unchanged element `index` of its state."""
    if value is None or value.opcode != "get-tuple-element" or _index(value) != index:
        return False
    return body[value.operands[0]].opcode == "parameter"


def _find_added(operand: Instruction, body: Computation) -> int | None:
    """Returns the number that a body adds to its counter, the larger of two if it may add either.

    If the counter may also stand still, to repeat an iteration, the trip count is a lower bound.
    """
    if operand.opcode == "select":
        choices = [_read_constant(body[name]) for name in operand.operands[1:]]
        return None if None in choices else max(c for c in choices if c is not None)
    return _read_constant(operand)


def _read_constant(instruction: Instruction) -> int | None:
    """Returns the value of an integer constant; None for any other instruction."""
    found = instruction.opcode == "constant" and instruction.argument.isdigit()
    return int(instruction.argument) if found else None
