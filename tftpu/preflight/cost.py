"""What a compiled step costs: memory, work, time, dollars; and where the time goes.

The time of an instruction is the compiler's own estimate of its cycles, over the core clock, with
two corrections, because that estimate prices vector work and memory alike on every generation
while the chips differ:

    time = max(bytes / (BANDWIDTH_SHARE x HBM bandwidth),
               min(c, max(VECTOR_PRICE x c, m / VECTOR_PRICE)))

with c the cycles over the clock and m the FLOPs of its dots and convolutions over the peak. So an
instruction that keeps the matrix units half busy or more costs what the compiler says, one that
leaves them idle costs half of that, and none is faster than 80 % of the memory bandwidth allows.
What the compiler does not price (custom calls, some window operations) costs its FLOPs and bytes.

The two constants were set once on four published ResNet-50 runs on v2, v3 and v4
(`python -m tftpu.launch.calibrate` compares); neither names a model or a chip. v5e, v5p and v6e
have no published row among them, so their range is wider.
"""

import collections
import dataclasses
import math
from collections.abc import Collection

from tftpu.preflight.compiler import Compiled
from tftpu.preflight.hlo import Instruction, Module, Tensor, layer_path
from tftpu.preflight.lower import Program
from tftpu.tpu.slices import Slice

BANDWIDTH_SHARE = 0.8  # of the HBM bandwidth on paper that a good kernel sustains
VECTOR_PRICE = 0.5  # of what the compiler estimates for work outside the matrix units
HOP_SECONDS = 1e-6  # one hop between neighbouring chips

# Half the width of the range that is given: the calibration rows lie within the first.
RANGE, RANGE_UNCALIBRATED = 0.15, 0.30
CALIBRATED = ("v2", "v3", "v4")

# Parts of the step outside all layers, by the name scopes that `tftpu.engines.tensorflow.step` opens.
_PARTS = {"loss": "(loss)", "metrics": "(metrics)", "optimizer": "(optimizer)"}
_REST = "(rest of the step)"

_FREE = {
    *(
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
    ),
    *("replica-id", "opt-barrier", "domain"),
}
_FREE_CALLS = ("X64", "ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ASYNCHRONOUS = ("copy-start", "slice-start", "async-start")
_READ_IN_PART = ("dynamic-slice", "gather", "slice")


@dataclasses.dataclass
class Memory:
    """HBM of one replica, in bytes."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments: the weights, updated
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass
class LargeTensor:
    """An array in HBM: its shape, its bytes with padding, and how many of these are padding."""

    shape: str
    bytes: int
    padding: int
    layer: str


@dataclasses.dataclass
class Priced:
    """An instruction with all its runs in a step."""

    name: str
    kind: str  # matrix, memory-bound, reduction, copy, collective, custom call
    layer: str
    op_name: str
    times: int
    seconds: float
    cycles: int
    flops: int
    hbm_bytes: int
    overlaps: bool = False  # an asynchronous copy, beside other instructions


@dataclasses.dataclass
class Cost:
    """One replica's step, in seconds, FLOPs and bytes of HBM."""

    memory: Memory
    large: list[LargeTensor]
    instructions: list[Priced]
    flops: int
    model_flops: int
    bytes_accessed: int
    cycles: int
    seconds: float
    seconds_low: float
    seconds_high: float
    roofline_seconds: float
    collective_seconds: float

    def by(self, attribute: str) -> list[tuple[str, float, int]]:
        """(name, seconds, cycles) by "layer" or "kind", the longest first."""
        sums: dict[str, list] = collections.defaultdict(lambda: [0.0, 0])
        for priced in self.instructions:
            if not priced.overlaps:
                total = sums[getattr(priced, attribute)]
                total[0] += priced.seconds
                total[1] += priced.cycles
        rows = [(name, *total) for name, total in sums.items()]
        return sorted(rows, key=lambda row: -row[1])


def price(program: Program, compiled: Compiled, target: Slice) -> Cost:
    """Counts and prices a compiled step.

    Args:
        program: the step as it was lowered.
        compiled: the step as it was compiled.
        target: the slice that it was compiled for.
    """
    module = Module(compiled.text)
    instructions = [
        _price(module, instruction, times, computation, program.layers, target)
        for instruction, times, computation in module.walk()
        if not _is_free(instruction)
    ]
    hbm_bytes = sum(p.hbm_bytes for p in instructions)
    collectives = sum(p.seconds for p in instructions if p.kind == "collective")
    memory_bound = hbm_bytes / target.bytes_per_s
    one_by_one = sum(p.seconds for p in instructions if not p.overlaps)
    seconds = max(one_by_one, memory_bound / BANDWIDTH_SHARE)
    flops = sum(p.flops for p in instructions)
    width = RANGE if target.generation.name in CALIBRATED else RANGE_UNCALIBRATED
    return Cost(
        memory=memory_of(compiled.memory),
        large=_large_tensors(module, program),
        instructions=instructions,
        flops=flops,
        model_flops=model_flops(program),
        bytes_accessed=hbm_bytes,
        cycles=sum(p.cycles for p in instructions),
        seconds=seconds,
        seconds_low=seconds * (1 - width),
        seconds_high=seconds * (1 + width),
        roofline_seconds=max(flops / target.flops_per_s, memory_bound),
        collective_seconds=collectives,
    )


def model_flops(program: Program) -> int:
    """FLOPs that the model needs for a step, whatever the program does: 3 x the forward products.

    Of products with weights only: 6 x parameters x tokens for a transformer (Kaplan et al. 2020),
    2 x 3 x multiply-adds for a CNN. The backward pass costs two forward passes.
    """
    module = Module(program.forward)
    forward = 0
    for instruction, times, computation in module.walk():
        # Batched products are attention's, of activations with activations.
        if not instruction.attribute(r"lhs_batch_dims=\{(\d[\d,]*)\}"):
            forward += times * module.matrix_flops(instruction, computation)
    return 3 * forward * program.gradient_accumulation_steps


def all_reduce_seconds(size: int, target: Slice) -> float:
    """A ring over all chips, both ways at once: 2 (n - 1) / n of the bytes over two links.

    Args:
        size: bytes that each replica holds.
    """
    chips = target.chips
    moved = 2 * size * (chips - 1) / chips
    return moved / (2 * target.generation.link_gbps * 1e9) + 2 * sum(target.axes) * HOP_SECONDS


def hbm_bytes(module: Module, instruction: Instruction, computation: dict) -> int:
    """Bytes of HBM that an instruction reads and writes, padding included.

    Of an operand that a fusion only slices, or of an array that it updates in place, the part.
    """
    if instruction.opcode in _ASYNCHRONOUS:  # of a pair (from, to), or (to, from)
        return sum(t.padded_bytes for t in instruction.shape[:2] if not t.on_chip)
    inner = _fused(module, instruction)
    read = sum(
        _read_bytes(inner, index, computation[name].shape)
        for index, name in enumerate(instruction.operands)
        if name in computation
    )
    return read + _written_bytes(inner, instruction)


def _is_free(instruction: Instruction) -> bool:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return True
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    return target.startswith(_FREE_CALLS) if target else False


def _price(
    module: Module,
    instruction: Instruction,
    times: int,
    computation: dict,
    layers: Collection[str],
    target: Slice,
) -> Priced:
    within = _all_within(module, instruction, computation)
    kind = _kind(instruction.opcode, {i.opcode for i, _ in within})
    flops = module.matrix_flops(instruction, computation)
    moved = hbm_bytes(module, instruction, computation)
    if kind == "custom call":
        flops = int(instruction.attribute(r'"flops":"?(\d+)') or flops)
        moved = int(instruction.attribute(r'"bytes_accessed":"?(\d+)') or moved)
    matrix, memory = flops / target.flops_per_s, moved / target.bytes_per_s
    cycles = instruction.cycles
    if kind == "collective":
        seconds = sum(_collective_seconds(i, inside, target) for i, inside in within)
        # A fused all-reduce is one of which each replica keeps a part: a reduce-scatter.
        seconds /= 2 if instruction.opcode == "fusion" else 1
    elif cycles is None:
        seconds = max(matrix / VECTOR_PRICE, memory / BANDWIDTH_SHARE)
    else:
        estimate = cycles / (target.generation.clock_ghz * 1e9)
        work = min(estimate, max(VECTOR_PRICE * estimate, matrix / VECTOR_PRICE))
        seconds = max(work, memory / BANDWIDTH_SHARE)
    return Priced(
        name=instruction.name,
        kind=kind,
        layer=_layer(instruction, layers, kind),
        op_name=instruction.op_name,
        times=times,
        seconds=seconds * times,
        cycles=(cycles or 0) * times,
        flops=flops * times,
        hbm_bytes=moved * times,
        overlaps=instruction.opcode in _ASYNCHRONOUS,
    )


def _kind(opcode: str, within: set[str]) -> str:
    """The kind of an instruction, by its opcode and those that a fusion runs."""
    if any(name.startswith(_COLLECTIVES) for name in within):
        return "collective"
    if opcode == "custom-call":
        return "custom call"
    if opcode.startswith(("copy", "slice-start", "async", "transpose", "pad")):
        return "copy"
    if {"dot", "convolution"} & within:
        return "matrix"
    if {"reduce", "reduce-window", "select-and-scatter"} & within:
        return "reduction"
    if within <= {"fusion", "parameter", "copy", "transpose", "bitcast", "reshape"}:
        return "copy"
    return "memory-bound"


def _layer(instruction: Instruction, layers: Collection[str], kind: str = "") -> str:
    """The layer that an instruction came from, or the part of the step in parentheses."""
    path = layer_path(instruction.op_name, layers)
    if path:
        return path
    if kind == "collective":
        return "(gradients of all replicas)"
    return _PARTS.get(layer_path(instruction.op_name, _PARTS).split("/")[0], _REST)


def _all_within(module: Module, instruction: Instruction, computation: dict) -> list[tuple]:
    """An instruction and all that a fusion runs, nested ones too, each with its computation."""
    found = [(instruction, computation)]
    for outer, _ in found:
        for name in outer.called if outer.opcode == "fusion" else ():
            inner = module.computations[name]
            found += [(inside, inner) for inside in inner.values()]
    return found


def _fused(module: Module, instruction: Instruction) -> dict[str, Instruction]:
    if instruction.opcode == "fusion" and instruction.called:
        return module.computations[instruction.called[0]]
    return {}


def _read_bytes(inner: dict, index: int, shape: list[Tensor]) -> int:
    whole = sum(t.padded_bytes for t in shape if not t.on_chip)
    if not whole:
        return 0
    names = [n for n, i in inner.items() if i.opcode == "parameter" and i.argument == str(index)]
    users = [i for i in inner.values() if names and names[0] in i.operands]
    if not users:
        return whole
    part = 0
    for user in users:
        if user.opcode in _READ_IN_PART and user.operands[0] == names[0]:
            part += user.shape[0].bytes
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != names[0]:
            return whole
    return min(part, whole)


def _written_bytes(inner: dict, instruction: Instruction) -> int:
    whole = sum(t.padded_bytes for t in instruction.shape if not t.on_chip)
    updates = [i for i in inner.values() if i.opcode == "dynamic-update-slice"]
    if len(updates) == 1 and len(instruction.shape) == 1:
        return min(whole, inner[updates[0].operands[1]].shape[0].bytes)
    return whole


def _collective_seconds(instruction: Instruction, computation: dict, target: Slice) -> float:
    """Of one collective; 0 for any other instruction. Both halves of an all-reduce cost half."""
    if not instruction.opcode.startswith(_COLLECTIVES):
        return 0.0
    operands = [t for name in instruction.operands if name in computation
                for t in computation[name].shape]  # fmt: skip
    size = max(sum(t.bytes for t in shape) for shape in (instruction.shape, operands))
    whole = all_reduce_seconds(size, target)
    return whole if instruction.opcode.startswith("all-reduce") else whole / 2


def memory_of(stats: dict[str, int]) -> Memory:
    """The HBM of one replica, from the compiler's figures."""
    return Memory(
        arguments=stats["argument_size_in_bytes"],
        outputs=stats["output_size_in_bytes"],
        aliased=stats["alias_size_in_bytes"],
        temporaries=stats["temp_size_in_bytes"],
        code=stats["generated_code_size_in_bytes"],
    )


def _large_tensors(module: Module, program: Program, count: int = 5) -> list[LargeTensor]:
    """The largest arrays that the program keeps in HBM, with what made them."""
    found: dict[tuple, LargeTensor] = {}
    for instruction in module.entry.values():
        if instruction.opcode in _FREE - {"parameter"} or instruction.opcode.endswith("-done"):
            continue
        if instruction.opcode == "parameter":
            layer = program.arguments[int(instruction.argument)]
        else:
            layer = _layer(instruction, program.layers)
        for tensor in instruction.shape:
            size = tensor.padded_bytes
            if not tensor.on_chip and tensor.dims:
                found[str(tensor), layer] = LargeTensor(
                    str(tensor), size, size - tensor.bytes, layer
                )
    return sorted(found.values(), key=lambda t: -t.bytes)[:count]


def arithmetic_intensity(cost: Cost) -> float:
    """FLOPs of matrix products for each byte of HBM."""
    return cost.flops / cost.bytes_accessed if cost.bytes_accessed else math.inf
