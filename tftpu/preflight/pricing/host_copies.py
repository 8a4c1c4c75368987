"""Copies between a chip and the memory of its host, which offloaded activations and states need.

The compiler writes such a copy as a pair: one instruction starts it, another waits for its end. In
layouts, the memory of the host is memory space 5.
"""

from tftpu.preflight.program.hlo import COPIES, Computation, Instruction, Tensor
from tftpu.tpu.slices import Slice

LINK = "host"  # a link of `collectives.Timeline`: one copy at a time
_STARTS = (*COPIES, "async-start")


def is_start(instruction: Instruction, computation: Computation) -> bool:
    """Returns whether an instruction starts a copy from or to the memory of the host."""
    return instruction.opcode in _STARTS and any(
        tensor.on_host for tensor in _list_arrays(instruction, computation)
    )


def is_end(instruction: Instruction, computation: Computation) -> bool:
    """Returns whether an instruction waits for the end of a copy from or to the host."""
    started = computation.get(instruction.operands[0]) if instruction.operands else None
    is_end = instruction.opcode.endswith("-done")
    return is_end and started is not None and is_start(started, computation)


def estimate_seconds(instruction: Instruction, computation: Computation, target: Slice) -> float:
    """Returns the time of a copy over the device's share of the chip's PCIe link.

    Args:
        instruction: the instruction that starts the copy.
        computation: the computation that contains it.
        target: the slice.
    """
    # Only the smallest array moves: a copy of a slice has the whole array as an operand.
    sizes = [t.bytes for t in _list_arrays(instruction, computation) if t.dims]
    generation = target.generation
    return min(sizes) / (generation.host_gbps / generation.cores * 1e9)


def _list_arrays(instruction: Instruction, computation: Computation) -> list[Tensor]:
    known = [computation[name] for name in instruction.operands if name in computation]
    return [*instruction.shape, *(tensor for operand in known for tensor in operand.shape)]
