"""Asynchronous work: an `async-start` starts it, and later instructions run beside it.

The compiler writes such work as a chain: an `async-start`, any number of `async-update`, and an
`async-done`. The work begins with the instruction that has its operands: the start, or the first
update where the SparseCore of v6e and later does the work.
"""

from tftpu.preflight.program.hlo import FREE, Computation, Instruction, Module, count_hbm_bytes

_CALLERS = ("async-start", "call", "custom-call")


def find_start(instruction: Instruction, computation: Computation) -> Instruction | None:
    """Returns the `async-start` of an instruction's asynchronous chain; None if it has none."""
    while instruction.opcode in ("async-update", "async-done"):
        instruction = computation[instruction.operands[0]]
    return instruction if instruction.opcode == "async-start" else None


def is_beginning(instruction: Instruction, computation: Computation) -> bool:
    """Returns whether the work of an asynchronous chain begins with this instruction."""
    if instruction.opcode == "async-update":
        before = computation[instruction.operands[0]]
        return before.opcode == "async-start" and not before.operands
    return instruction.opcode == "async-start" and bool(instruction.operands)


def is_on_sparse_core(start: Instruction) -> bool:
    """Returns whether the SparseCore does an `async-start`'s work, beside the TensorCore."""
    return 'async_execution_thread="sparsecore"' in start.rest


def count_asynchronous_bytes(
    module: Module, instruction: Instruction, computation: Computation
) -> int:
    """Returns the bytes that an instruction moves from and to HBM, asynchronous work included.

    Counts bytes as `count_hbm_bytes` does; all bytes of a chain belong to the instruction that
    begins its work.
    """
    start = find_start(instruction, computation)
    if start is None:
        return count_hbm_bytes(module, instruction, computation)
    return _count_called_bytes(module, start) if is_beginning(instruction, computation) else 0


def _count_called_bytes(module: Module, caller: Instruction) -> int:
    """Returns the bytes that are moved by the computations that an instruction calls."""
    moved = 0
    for name in caller.called:
        body = module.computations[name]
        for inside in body.values():
            if inside.opcode in _CALLERS and inside.called:
                moved += _count_called_bytes(module, inside)
            elif inside.opcode not in FREE and not inside.opcode.endswith("-done"):
                moved += count_hbm_bytes(module, inside, body)
    return moved
