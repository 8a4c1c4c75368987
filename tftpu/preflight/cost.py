"""Cost of a compiled step: memory, work, and time by instruction.

The time of an instruction is the compiler's estimate of its cycles divided by the core clock, with
two corrections. They are needed because that estimate prices vector work and memory traffic alike
on every generation, although the chips differ:

    time = max(bytes / (BANDWIDTH_SHARE x HBM bandwidth),
               min(c, max(VECTOR_PRICE x c, m / VECTOR_PRICE)))

where c is the cycles over the clock, and m the FLOPs of its dots and convolutions over the peak.
Thus an instruction that keeps the matrix units at least half busy costs what the compiler
estimates, one that leaves them idle costs half of that, and none takes less time than its bytes
need at 80 % of the memory bandwidth. Instructions without an estimate (custom calls, some window
operations) are priced by their FLOPs and bytes.

The two constants were fitted once, to four published ResNet-50 runs on v2, v3 and v4
(`python -m tftpu.launch.calibrate` compares predictions with them). Neither is specific to a model
or a chip. v5e, v5p and v6e are not among these runs, so their range is wider.
"""

import collections
import dataclasses
import math
from typing import Literal

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight import collectives
from tftpu.preflight.collectives import Timeline, key_of
from tftpu.preflight.compiler import Compiled
from tftpu.preflight.hlo import ASYNCHRONOUS, Computation, Instruction, Module, hbm_bytes
from tftpu.preflight.kernels import kernel_flops
from tftpu.preflight.loops import Runs
from tftpu.tpu.slices import Slice

BANDWIDTH_SHARE = 0.8  # fraction of the nominal HBM bandwidth that a good kernel sustains
VECTOR_PRICE = 0.5  # fraction of the compiler's estimate, for work outside the matrix units

# Half the width of the predicted range, as a fraction. The calibration rows are within the first.
RANGE, RANGE_UNCALIBRATED = 0.15, 0.30
CALIBRATED = ("v2", "v3", "v4")

_REST = "(rest of the step)"
KERNEL, CALL = "kernel", "custom call"  # kinds: a Pallas kernel, and a call of the compiler's own

_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "recv"),
}
_FREE_CALLS = ("X64", "ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")


@dataclasses.dataclass
class Memory:
    """HBM that one replica's program uses, in bytes.

    Attributes:
        arguments: inputs of the program: weights, optimizer state, batch.
        outputs: results of the program.
        aliased: outputs that share the memory of arguments, such as the updated weights.
        temporaries: activations and other intermediate results, at the moment of most use.
        code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Total bytes that the program needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass
class LargeTensor:
    """An array in HBM.

    Attributes:
        shape: dtype and dimensions, such as "f32[128,256]".
        bytes: size with padding.
        padding: bytes of padding.
        layer: the layer that computes it, or the variable that it holds.
    """

    shape: str
    bytes: int
    padding: int
    layer: str


@dataclasses.dataclass
class Priced:
    """The cost of an instruction, summed over its runs in a step.

    Attributes:
        name: name of the instruction.
        kind: such as "matrix", "memory-bound", "reduction", "copy", "collective" or "kernel".
        layer: the Keras layer that it belongs to, or a part of the step in parentheses.
        op_name: the op that it came from.
        times: runs per step.
        seconds: predicted time.
        cycles: the compiler's estimate, 0 if it makes none.
        flops: FLOPs of dots and convolutions.
        hbm_bytes: bytes read from and written to HBM.
        overlaps: whether it is an asynchronous copy that overlaps with other instructions.
    """

    name: str
    kind: str
    layer: str
    op_name: str
    times: int
    seconds: float
    cycles: int
    flops: int
    hbm_bytes: int
    overlaps: bool = False


@dataclasses.dataclass
class Cost:
    """The cost of one replica's step.

    Attributes:
        memory: HBM in use.
        large: the largest arrays in HBM, the largest first.
        instructions: every instruction that runs.
        flops: FLOPs of the program's dots and convolutions.
        model_flops: FLOPs that the model needs, as `model_flops` counts them.
        bytes_accessed: HBM traffic.
        cycles: the compiler's estimate.
        seconds: predicted time; `seconds_low` and `seconds_high` are the ends of its range.
        roofline_seconds: time at peak FLOP/s or peak bandwidth, whichever is longer.
        collective_seconds: predicted time of the collectives that no other work hides, included in
            `seconds`.
        uncounted_loops: names of loops whose trip count is not in the program: counted once.
        silent_kernels: layers of kernels that say nothing of their work: only their traffic counts.
    """

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
    uncounted_loops: list[str]
    silent_kernels: list[str]

    def by(self, attribute: Literal["layer", "kind"]) -> list[tuple[str, float, int]]:
        """Returns (name, seconds, cycles) per layer or kind, the longest time first."""
        seconds: dict[str, float] = collections.defaultdict(float)
        cycles: dict[str, int] = collections.defaultdict(int)
        for priced in self.instructions:
            if not priced.overlaps:
                name = priced.layer if attribute == "layer" else priced.kind
                seconds[name] += priced.seconds
                cycles[name] += priced.cycles
        rows = [(name, seconds[name], cycles[name]) for name in seconds]
        return sorted(rows, key=lambda row: -row[1])


def price(step: LoweredStep, compiled: Compiled, target: Slice) -> Cost:
    """Returns the cost of a compiled step.

    Args:
        step: the step before compilation.
        compiled: the step after compilation.
        target: the slice that it was compiled for.
    """
    module = Module(compiled.text)
    pricing, runs = _Pricing(module, step, target), Runs(module)
    instructions = [
        pricing.price(instruction, times, computation)
        for instruction, times, computation in runs.walk()
        if not _is_free(instruction)
    ]
    hbm_bytes = sum(p.hbm_bytes for p in instructions)
    exchanging = sum(p.seconds for p in instructions if p.kind == "collective")
    memory_bound = hbm_bytes / target.bytes_per_s
    one_by_one = sum(p.seconds for p in instructions if not p.overlaps)
    seconds = max(one_by_one, memory_bound / BANDWIDTH_SHARE)
    flops = sum(p.flops for p in instructions)
    width = RANGE if target.generation.name in CALIBRATED else RANGE_UNCALIBRATED
    return Cost(
        memory=memory_of(compiled.memory),
        large=_large_tensors(module, step),
        instructions=instructions,
        flops=flops,
        model_flops=model_flops(step),
        bytes_accessed=hbm_bytes,
        cycles=sum(p.cycles for p in instructions),
        seconds=seconds,
        seconds_low=seconds * (1 - width),
        seconds_high=seconds * (1 + width),
        roofline_seconds=max(flops / target.flops_per_s, memory_bound),
        collective_seconds=exchanging,
        uncounted_loops=runs.uncounted(),
        silent_kernels=sorted(pricing.silent),
    )


def model_flops(step: LoweredStep) -> int:
    """Returns the FLOPs that the model needs for a step, independent of the compiled program.

    They are 3 times the FLOPs of the forward pass, as the backward pass costs two forward passes.
    Only products with weights count: 6 x parameters x tokens for a transformer (Kaplan et al.
    2020), 6 x multiply-adds for a CNN.
    """
    module = Module(step.forward)
    forward = 0
    for instruction, times, computation in Runs(module).walk(needed=True):
        # Batched products are those of attention: activations times activations.
        if not instruction.attribute(r"lhs_batch_dims=\{(\d[\d,]*)\}"):
            forward += times * module.matrix_flops(instruction, computation)
    return 3 * forward * step.gradient_accumulation_steps // step.forward_devices


def _is_free(instruction: Instruction) -> bool:
    if instruction.opcode in _FREE:
        return True
    if instruction.opcode.endswith("-done"):
        return not collectives.is_collective(instruction)
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    return target.startswith(_FREE_CALLS) if target else False


class _Pricing:
    """Prices the instructions of a program, in the order in which they run.

    Args:
        module: the program.
        step: the step before compilation.
        target: the slice.
    """

    def __init__(self, module: Module, step: LoweredStep, target: Slice):
        self._module, self._step, self._target = module, step, target
        self.silent: set[str] = set()  # layers of kernels that say nothing of their work
        self._timelines: dict[int, Timeline] = collections.defaultdict(Timeline)

    def price(self, instruction: Instruction, times: int, computation: Computation) -> Priced:
        """Returns the cost of an instruction.

        Args:
            instruction: the next one.
            times: its runs per step.
            computation: the one that contains it.
        """
        within = all_within(self._module, instruction, computation)
        kind = _kind(instruction, {i.opcode for i, _ in within})
        flops = self._module.matrix_flops(instruction, computation)
        moved = hbm_bytes(self._module, instruction, computation)
        if kind in (CALL, KERNEL):
            moved = int(instruction.attribute(r'"bytes_accessed":"?(\d+)') or moved)
            said = instruction.attribute(r'"flops":"?(\d+)')
            counted = int(said) if said else kernel_flops(instruction) if kind == KERNEL else flops
            if counted is None:
                self.silent.add(_layer(instruction, self._step))
            flops = counted or 0
        seconds = self._work(instruction, flops, moved)
        overlaps = instruction.opcode in ASYNCHRONOUS
        timeline = self._timelines[id(computation)]
        if any(collectives.is_collective(inside) for inside, _ in within):
            work = seconds if flops or timeline.is_running(key_of(instruction, within)) else 0.0
            kind, seconds = self._exchange(instruction, within, kind, work, timeline)
            overlaps = False
        elif not overlaps:
            timeline.work(seconds)
        return Priced(
            name=instruction.name,
            kind=kind,
            layer=_layer(instruction, self._step, kind),
            op_name=instruction.op_name,
            times=times,
            seconds=seconds * times,
            cycles=(instruction.cycles or 0) * times,
            flops=flops * times,
            hbm_bytes=moved * times,
            overlaps=overlaps,
        )

    def _work(self, instruction: Instruction, flops: int, moved: int) -> float:
        """Returns the seconds of an instruction that exchanges nothing."""
        target = self._target
        matrix, memory = flops / target.flops_per_s, moved / target.bytes_per_s
        if instruction.cycles is None:
            return max(matrix / VECTOR_PRICE, memory / BANDWIDTH_SHARE)
        estimate = instruction.cycles / (target.generation.clock_ghz * 1e9)
        work = min(estimate, max(VECTOR_PRICE * estimate, matrix / VECTOR_PRICE))
        return max(work, memory / BANDWIDTH_SHARE)

    def _exchange(
        self,
        instruction: Instruction,
        within: collectives.Within,
        kind: str,
        work: float,
        timeline: Timeline,
    ) -> tuple[str, float]:
        """Returns the kind and the seconds of an instruction with a collective, and other work."""
        key = key_of(instruction, within)
        if collectives.ends(instruction, within):
            return "collective", timeline.wait(key)
        seconds = sum(collectives.seconds(i, inside, self._target) for i, inside in within)
        if collectives.starts(instruction, within):
            timeline.start(key, seconds, collectives.is_between_slices(instruction))
            timeline.work(work)
            return kind if work else "collective", work
        if timeline.is_running(key):  # the work of others, while the collective carries on
            timeline.work(work)
            return kind, work
        # In a fused all-reduce each device keeps one part of the sum: a reduce-scatter.
        seconds /= 2 if instruction.opcode == "fusion" else 1
        timeline.work(seconds + work)
        return "collective", seconds + work


def _kind(instruction: Instruction, within: set[str]) -> str:
    """Returns the kind of an instruction, given all opcodes that it runs."""
    if instruction.opcode == "custom-call":
        return KERNEL if 'custom_call_target="tpu_custom_call"' in instruction.rest else CALL
    if instruction.opcode.startswith(("copy", "slice-start", "async", "transpose", "pad")):
        return "copy"
    if {"dot", "convolution"} & within:
        return "matrix"
    if {"reduce", "reduce-window", "select-and-scatter"} & within:
        return "reduction"
    if within <= {"fusion", "parameter", "copy", "transpose", "bitcast", "reshape"}:
        return "copy"
    return "memory-bound"


def _layer(instruction: Instruction, step: LoweredStep, kind: str = "") -> str:
    """Returns the layer of an instruction, or a part of the step in parentheses."""
    path = step.layer_path(instruction.op_name)
    if path:
        return path
    if kind == "collective":
        return "(exchange between devices)"
    scope = step.scope(instruction.op_name)
    return f"({scope})" if scope else _REST


def all_within(
    module: Module, instruction: Instruction, computation: Computation
) -> list[tuple[Instruction, Computation]]:
    """Returns an instruction, and those it fuses, each with its computation."""
    found = [(instruction, computation)]
    for outer, _ in found:
        for name in outer.called if outer.opcode in ("fusion", "async-start") else ():
            inner = module.computations[name]
            found += [(inside, inner) for inside in inner.values()]
    return found


def memory_of(stats: dict[str, int]) -> Memory:
    """Returns one replica's HBM use, given `Compiled.memory`.

    The compiler's sum of temporaries can exceed the chip's memory for a program that fits, and its
    peak also counts arrays that lie on the core instead of in HBM. The lower of the two is taken.
    """
    arguments, outputs = stats["argument_size_in_bytes"], stats["output_size_in_bytes"]
    aliased = stats["alias_size_in_bytes"]
    at_peak = stats["peak_memory_in_bytes"] - arguments - (outputs - aliased)
    return Memory(
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=min(stats["temp_size_in_bytes"], max(0, at_peak)),
        code=stats["generated_code_size_in_bytes"],
    )


def _large_tensors(module: Module, step: LoweredStep, count: int = 5) -> list[LargeTensor]:
    """Returns the largest arrays that the program keeps in HBM, the largest first."""
    found: dict[tuple[str, str], LargeTensor] = {}
    for instruction in module.entry.values():
        if instruction.opcode in _FREE - {"parameter"} or instruction.opcode.endswith("-done"):
            continue
        if instruction.opcode == "parameter":
            layer = step.arguments[int(instruction.argument)]
        else:
            layer = _layer(instruction, step)
        for tensor in instruction.shape:
            size = tensor.padded_bytes
            if not tensor.on_chip and tensor.dims:
                found[str(tensor), layer] = LargeTensor(
                    str(tensor), size, size - tensor.bytes, layer
                )
    return sorted(found.values(), key=lambda t: -t.bytes)[:count]


def arithmetic_intensity(cost: Cost) -> float:
    """Returns the FLOPs of matrix products per byte of HBM traffic."""
    return cost.flops / cost.bytes_accessed if cost.bytes_accessed else math.inf
