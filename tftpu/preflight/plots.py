"""The data of the plots of a compiled step: memory, roofline and collectives."""

import dataclasses
import itertools
from collections.abc import Iterable

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.pricing import collectives
from tftpu.preflight.pricing.cost import Cost, LargeTensor
from tftpu.preflight.pricing.instructions import list_within
from tftpu.preflight.program.hlo import Instruction, Module
from tftpu.preflight.program.lifetimes import Array, Lifetimes, Loop
from tftpu.preflight.program.loops import Runs
from tftpu.tpu.slices import Slice

MAX_PLACES = 200  # maximum number of points of a memory curve
MAX_POINTS = 60  # maximum number of instructions in a roofline
MAX_EXCHANGES = 20
_LARGEST = 8  # maximum number of arrays that are listed for the peak


@dataclasses.dataclass
class MemoryCurve:
    """HBM in use over the instructions of a step, in program order.

    Attributes:
        instructions: number of instructions; those in the body of a loop count once.
        base: bytes in use throughout: arguments, outputs with their own memory, and code.
        held: bytes of the parts of `base` that do not depend on the batch, such as the weights.
        bytes: most bytes in use, `base` included, in each of at most 200 equal parts of the
            program.
        layers: the layer that runs where most bytes are in use, for each of these parts.
        arrays: the largest arrays at the peak that are not in `base`.
        loops: the outermost loops; their `first` and `last` are indices of `bytes`.
    """

    instructions: int
    base: int
    held: dict[str, int]
    bytes: list[int]
    layers: list[str]
    arrays: list[LargeTensor]
    loops: list[Loop]

    @property
    def peak(self) -> int:
        """The index in `bytes` at which the most bytes are in use."""
        return self.bytes.index(max(self.bytes))


@dataclasses.dataclass
class RooflinePoint:
    """An instruction with matrix products, over all its runs in a step.

    Attributes:
        name: name of the instruction.
        layer: the layer that it belongs to.
        kind: the kind of work.
        flops: FLOPs of its dots and convolutions.
        hbm_bytes: bytes read from and written to HBM; 0 if all is in the core's own memory.
        ms: predicted time.
    """

    name: str
    layer: str
    kind: str
    flops: int
    hbm_bytes: int
    ms: float


@dataclasses.dataclass
class Exchange:
    """Collectives of one kind in one layer, over all their runs in a step.

    Attributes:
        opcode: such as "all-reduce"; "between slices" for those over the network.
        layer: the layer that they belong to.
        count: number of runs.
        sent_bytes: bytes that a chip sends.
        ms: predicted time of the exchange itself.
        waited_ms: the part of the step's time in which only these collectives run; other work
            hides the rest of `ms`.
    """

    opcode: str
    layer: str
    count: int = 0
    sent_bytes: float = 0.0
    ms: float = 0.0
    waited_ms: float = 0.0


@dataclasses.dataclass
class Plots:
    """The data of the plots of a step on one slice.

    Attributes:
        memory: HBM in use over the instructions.
        points: the instructions with matrix products that take the longest, at most 60.
        exchanges: the collectives that take the longest, at most 20 rows.
    """

    memory: MemoryCurve
    points: list[RooflinePoint]
    exchanges: list[Exchange]


def build_plots(step: LoweredStep, compiled: Compiled, cost: Cost, target: Slice) -> Plots:
    """Returns the plots of a compiled step.

    Args:
        step: the step before compilation.
        compiled: the step after compilation; its `text` must not be empty.
        cost: its cost.
        target: the slice that it was compiled for.
    """
    module = Module(compiled.text)
    return Plots(
        _build_memory(module, step, cost), _list_points(cost), _list_exchanges(module, cost, target)
    )


def _build_memory(module: Module, step: LoweredStep, cost: Cost) -> MemoryCurve:
    lifetimes = Lifetimes(module)
    layers = {priced.name: priced.layer for priced in cost.instructions}
    in_use = _compute_in_use(lifetimes.arrays, len(lifetimes.order))
    peak = in_use.index(max(in_use))
    base = cost.memory.total - cost.memory.temporaries
    count = len(in_use)
    places = min(MAX_PLACES, count)
    starts = [place * count // places for place in range(places + 1)]
    highest = [
        max(range(start, end), key=in_use.__getitem__) for start, end in itertools.pairwise(starts)
    ]
    live = [a for a in lifetimes.arrays if a.first <= peak <= a.last]
    return MemoryCurve(
        instructions=count,
        base=base,
        held={name: size for name, size in step.state_bytes._asdict().items() if size},
        bytes=[base + in_use[at] for at in highest],
        layers=[_find_layer(lifetimes.order[at], layers, step) for at in highest],
        arrays=[
            _describe_large(a, layers) for a in sorted(live, key=lambda a: -a.bytes)[:_LARGEST]
        ],
        loops=[
            Loop(loop.first * places // count, loop.last * places // count, loop.times)
            for loop in lifetimes.loops
        ],
    )


def _compute_in_use(arrays: Iterable[Array], count: int) -> list[int]:
    """Returns the bytes of the arrays that live at each of `count` instructions."""
    changes = [0] * (count + 1)
    for array in arrays:
        changes[array.first] += array.bytes
        changes[array.last + 1] -= array.bytes
    total, in_use = 0, []
    for change in changes[:-1]:
        total += change
        in_use.append(total)
    return in_use


def _find_layer(instruction: Instruction, layers: dict[str, str], step: LoweredStep) -> str:
    """Returns the layer of an instruction; `layers` lacks the instructions that take no time."""
    return layers.get(instruction.name) or step.find_layer_path(instruction.op_name) or "(no layer)"


def _describe_large(array: Array, layers: dict[str, str]) -> LargeTensor:
    """Describes a large array and the layer that writes to it first."""
    layer = next((layers[name] for name in array.names if name in layers), "(constant)")
    padding = array.bytes - array.tensor.bytes
    return LargeTensor(str(array.tensor), array.bytes, padding, layer)


def _list_points(cost: Cost) -> list[RooflinePoint]:
    with_products = [p for p in cost.instructions if p.flops and p.seconds]
    longest = sorted(with_products, key=lambda p: -p.seconds)[:MAX_POINTS]
    return [
        RooflinePoint(p.name, p.layer, p.kind, p.flops, p.hbm_bytes, p.seconds * 1e3)
        for p in longest
    ]


def _list_exchanges(module: Module, cost: Cost, target: Slice) -> list[Exchange]:
    """Returns the collectives by opcode and layer, the longest first."""
    priced = {p.name: p for p in cost.instructions}
    found: dict[tuple[str, str], Exchange] = {}
    running: dict[tuple[int, str], Exchange] = {}
    for instruction, times, computation in Runs(module).iterate():
        price = priced.get(instruction.name)
        within = list_within(module, instruction, computation) if price else []
        inside = [(i, c) for i, c in within if collectives.is_collective(i)]
        if price is None or not inside:
            continue
        key = id(computation), collectives.find_key(instruction, within)
        if collectives.is_end(instruction, within):
            if key in running:
                running.pop(key).waited_ms += price.seconds * 1e3
        elif key not in running:  # a running collective was counted at its start
            opcode = _name_opcode(inside[0][0])
            exchange = found.setdefault((opcode, price.layer), Exchange(opcode, price.layer))
            exchange.count += times
            sent = sum(collectives.count_sent_bytes(i, c, target) for i, c in inside)
            exchange.sent_bytes += times * sent
            if collectives.is_start(instruction, within):
                running[key] = exchange
                seconds = sum(collectives.estimate_seconds(i, c, target) for i, c in inside)
                exchange.ms += times * seconds * 1e3
            else:
                exchange.ms += price.seconds * 1e3
                exchange.waited_ms += price.seconds * 1e3
    return sorted(found.values(), key=lambda e: -e.ms)[:MAX_EXCHANGES]


def _name_opcode(collective: Instruction) -> str:
    if collectives.is_between_slices(collective):
        return "between slices"
    return collective.opcode.removesuffix("-start")
