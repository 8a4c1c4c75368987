"""Cost of a compiled step: memory, work, and time by instruction."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.pricing.instructions import FREE, Priced, Pricing, find_layer, is_free
from tftpu.preflight.pricing.prices import BASES, PRICES
from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.loops import Runs
from tftpu.tpu.slices import Slice

_ALLOCATES = r'custom_call_target="(AllocateBuffer)"'


@dataclasses.dataclass
class Memory:
    """HBM that one replica's program uses, in bytes.

    Attributes:
        arguments: inputs of the program: weights, optimizer state, batch.
        outputs: results of the program.
        aliased: outputs that share the memory of arguments, such as the updated weights.
        temporaries: activations and other intermediate results, at their peak.
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
class Cost:
    """The cost of one replica's step.

    Attributes:
        memory: HBM in use.
        large: the largest arrays in HBM, the largest first.
        instructions: the instructions that run, without those that take no time.
        flops: FLOPs of the program's dots and convolutions.
        model_flops: FLOPs that the model needs, as the engine counts them.
        bytes_accessed: HBM traffic.
        cycles: the compiler's estimate, in core cycles.
        seconds: predicted time; `seconds_low` and `seconds_high` are the ends of its range.
        roofline_seconds: time at peak FLOP/s or peak bandwidth, whichever is longer.
        collective_seconds: predicted time of the collectives that no other work hides, included in
            `seconds`.
        uncounted_loops: names of loops of unknown trip count, which are priced as one iteration.
        silent_kernels: layers of kernels that do not state their FLOPs: only their traffic counts.
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

    def group_by(self, attribute: Literal["layer", "kind"]) -> list[tuple[str, float, int]]:
        """Returns (name, seconds, cycles) per layer or kind, longest first; skips hidden work."""
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
    pricing, runs = Pricing(module, step, target), Runs(module)
    instructions = [
        pricing.price(instruction, times, computation)
        for instruction, times, computation in runs.iterate()
        if not is_free(module, instruction, computation)
    ]
    hbm_bytes = sum(p.hbm_bytes for p in instructions)
    exchanging = sum(p.seconds for p in instructions if p.kind == "collective")
    memory_bound = hbm_bytes / target.bytes_per_s
    one_by_one = sum(p.seconds for p in instructions if not p.overlaps)
    seconds = max(one_by_one, memory_bound / PRICES.bandwidth)
    flops = sum(p.flops for p in instructions)
    basis = BASES[target.generation.name]
    return Cost(
        memory=parse_memory_stats(compiled.memory),
        large=_find_large_tensors(module, runs, step),
        instructions=instructions,
        flops=flops,
        model_flops=step.model_flops,
        bytes_accessed=hbm_bytes,
        cycles=sum(p.cycles for p in instructions),
        seconds=seconds,
        seconds_low=seconds * basis.low,
        seconds_high=seconds * basis.high,
        roofline_seconds=max(flops / target.flops_per_s, memory_bound),
        collective_seconds=exchanging,
        uncounted_loops=runs.list_uncounted(),
        silent_kernels=sorted(pricing.silent),
    )


def parse_memory_stats(stats: dict[str, int]) -> Memory:
    """Returns one replica's HBM use, given `Compiled.memory`.

    The compiler's sum of temporaries can exceed the chip's memory for a program that fits. Its peak
    also counts arrays that lie on the core, or on the host, instead of in HBM. The result's
    `temporaries` are the lower of the two.
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


def count_host_bytes(stats: Mapping[str, int]) -> int:
    """Returns the bytes that one replica's program keeps in its host's memory."""
    kept = (stats.get(f"host_{part}_size_in_bytes", 0) for part in ("argument", "output", "temp"))
    return sum(kept) - stats.get("host_alias_size_in_bytes", 0)


def _find_large_tensors(
    module: Module, runs: Runs, step: LoweredStep, count: int = 5
) -> list[LargeTensor]:
    """Returns the largest arrays that the program keeps in HBM, the largest first."""
    found: dict[tuple[str, str], LargeTensor] = {}
    for instruction, _, computation in runs.iterate():
        given = instruction.opcode == "parameter" and computation is module.entry
        if (not given and instruction.opcode in FREE) or instruction.opcode.endswith("-done"):
            continue
        if instruction.match_attribute(_ALLOCATES):  # its array is listed with the op that fills it
            continue
        layer = (
            step.arguments[int(instruction.argument)] if given else find_layer(instruction, step)
        )
        for tensor in instruction.shape:
            size = tensor.padded_bytes
            if tensor.in_hbm and tensor.dims:
                found[str(tensor), layer] = LargeTensor(
                    str(tensor), size, size - tensor.bytes, layer
                )
    return sorted(found.values(), key=lambda t: -t.bytes)[:count]


def compute_intensity(cost: Cost) -> float:
    """Returns the FLOPs of matrix products per byte of HBM traffic; infinite without traffic."""
    return cost.flops / cost.bytes_accessed if cost.bytes_accessed else math.inf
