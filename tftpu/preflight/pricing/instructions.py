"""Prices the instructions of a compiled program, in the order in which they run."""

import collections
import dataclasses
import re
from collections.abc import Callable

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.pricing import collectives, host_copies
from tftpu.preflight.pricing.collectives import Timeline, find_key
from tftpu.preflight.pricing.prices import PRICES, Kind
from tftpu.preflight.program.asynchronous import (
    count_asynchronous_bytes,
    find_start,
    is_beginning,
    is_on_sparse_core,
)
from tftpu.preflight.program.hlo import COPIES, FREE, Computation, Instruction, Module
from tftpu.preflight.program.kernels import count_kernel_flops
from tftpu.tpu.slices import Slice

# Matches a convolution with groups of channels, or the gradient of its kernel.
_GROUPS = re.compile(r"(?:feature|batch)_group_count=(?!1\b)\d")
_REST = "(rest of the step)"
_KEPT = "(what a loop over blocks keeps)"
SPARSE_CORE = "sparse core"  # a link of `collectives.Timeline`: one operation at a time
_RUN = ("fusion", "async-start", "call", "custom-call")
_FREE_CALLS = ("X64", "ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")


@dataclasses.dataclass
class Priced:
    """The cost of an instruction, summed over its runs in a step.

    Attributes:
        name: the name of the instruction.
        kind: the kind of its work.
        layer: the Keras layer that it belongs to, or a part of the step in parentheses.
        op_name: the op that it came from.
        times: the number of runs per step.
        seconds: the predicted time.
        cycles: the compiler's estimate in cycles; 0 if there is none.
        flops: FLOPs of dots and convolutions.
        hbm_bytes: bytes read from and written to HBM.
        overlaps: whether it only starts work that overlaps with other instructions.
    """

    name: str
    kind: Kind
    layer: str
    op_name: str
    times: int
    seconds: float
    cycles: int
    flops: int
    hbm_bytes: int
    overlaps: bool = False


def is_free(module: Module, instruction: Instruction, computation: Computation) -> bool:
    """Returns whether an instruction takes no time and waits for nothing."""
    if instruction.opcode in FREE:
        return True
    start = find_start(instruction, computation)
    if start is not None and instruction.opcode != "async-done":
        return not is_beginning(instruction, computation)
    if start is not None and is_on_sparse_core(start):
        return False
    if instruction.opcode.endswith("-done"):
        within = list_within(module, instruction, computation)
        waits = any(collectives.is_collective(inside) for inside, _ in within)
        return not waits and not host_copies.is_end(instruction, computation)
    target = instruction.match_attribute(r'custom_call_target="([^"]*)"')
    return target.startswith(_FREE_CALLS) if target else False


class Pricing:
    """A calculator of the cost of a program's instructions, priced in the order in which they run.

    Args:
        module: the program.
        step: the step before compilation.
        target: the slice.
        build_timeline: function that returns a new timeline; each computation gets its own.
    """

    def __init__(
        self,
        module: Module,
        step: LoweredStep,
        target: Slice,
        build_timeline: Callable[[], Timeline] = Timeline,
    ):
        self._module, self._step, self._target = module, step, target
        self.silent: set[str] = set()  # layers whose kernels do not state their FLOPs
        self._timelines: dict[int, Timeline] = collections.defaultdict(build_timeline)

    def price(self, instruction: Instruction, times: int, computation: Computation) -> Priced:
        """Returns the cost of an instruction.

        Args:
            instruction: the next instruction in program order.
            times: its runs per step.
            computation: the computation that contains it.
        """
        within = list_within(self._module, instruction, computation)
        start = find_start(instruction, computation)
        on_sparse_core = start is not None and is_on_sparse_core(start)
        kind = _choose_kind(instruction, within, on_sparse_core)
        flops = self._module.count_matrix_flops(instruction, computation)
        moved = count_asynchronous_bytes(self._module, instruction, computation)
        if kind in ("custom call", "kernel"):
            moved = int(instruction.match_attribute(r'"bytes_accessed":"?(\d+)') or moved)
            said = instruction.match_attribute(r'"flops":"?(\d+)')
            counted = (
                int(said)
                if said
                else count_kernel_flops(instruction)
                if kind == "kernel"
                else flops
            )
            if counted is None:
                self.silent.add(find_layer(instruction, self._step))
            flops = counted or 0
        seconds = self._price_work(kind, instruction, flops, moved)
        overlaps = instruction.opcode in (*COPIES, "async-start")
        timeline = self._timelines[id(computation)]
        if any(collectives.is_collective(inside) for inside, _ in within):
            work = seconds if flops or timeline.is_running(find_key(instruction, within)) else 0.0
            kind, seconds = self._price_exchange(instruction, within, kind, work, timeline)
            overlaps = False
        elif host_copies.is_start(instruction, computation):
            seconds = host_copies.estimate_seconds(instruction, computation, self._target)
            timeline.start(instruction.name, seconds, host_copies.LINK)
            kind, overlaps = "host copy", True
        elif host_copies.is_end(instruction, computation):
            kind, seconds = "host copy", timeline.wait(instruction.operands[0])
        elif start is not None and on_sparse_core:
            if instruction.opcode == "async-done":
                seconds, overlaps = timeline.wait(start.name), False
            else:
                timeline.start(start.name, seconds, SPARSE_CORE)
                overlaps = True
        elif not overlaps:
            timeline.run(seconds)
        return Priced(
            name=instruction.name,
            kind=kind,
            layer=find_layer(start or instruction, self._step, kind),
            op_name=(start or instruction).op_name,
            times=times,
            seconds=seconds * times,
            cycles=(instruction.cycles or 0) * times,
            flops=flops * times,
            hbm_bytes=moved * times,
            overlaps=overlaps,
        )

    def _price_work(self, kind: Kind, instruction: Instruction, flops: int, moved: int) -> float:
        """Returns the seconds of an instruction's work, without collectives."""
        target, cycles = self._target, instruction.cycles
        estimate = None if cycles is None else cycles / (target.generation.clock_ghz * 1e9)
        products, traffic = flops / target.flops_per_s, moved / target.bytes_per_s
        return PRICES.estimate_seconds(kind, estimate, products, traffic)

    def _price_exchange(
        self,
        instruction: Instruction,
        within: collectives.Within,
        kind: Kind,
        work: float,
        timeline: Timeline,
    ) -> tuple[Kind, float]:
        """Returns the kind and the seconds of an instruction with a collective and other work."""
        key = find_key(instruction, within)
        if collectives.is_end(instruction, within):
            return "collective", timeline.wait(key)
        seconds = sum(collectives.estimate_seconds(i, inside, self._target) for i, inside in within)
        if collectives.is_start(instruction, within):
            between = collectives.is_between_slices(instruction)
            timeline.start(key, seconds, "network" if between else "slice")
            timeline.run(work)
            return kind if work else "collective", work
        if timeline.is_running(key):  # does other work while the collective continues
            timeline.run(work)
            return kind, work
        # A fused all-reduce is a reduce-scatter: each device keeps one shard of the sum.
        seconds /= 2 if instruction.opcode == "fusion" else 1
        timeline.run(seconds + work)
        return "collective", seconds + work


def _choose_kind(
    instruction: Instruction, within: collectives.Within, on_sparse_core: bool
) -> Kind:
    """Classifies an instruction by all the instructions that it runs."""
    if instruction.opcode == "custom-call":
        is_kernel = 'custom_call_target="tpu_custom_call"' in instruction.rest
        return "kernel" if is_kernel else "custom call"
    copies = instruction.opcode.startswith("async") and not on_sparse_core
    if copies or instruction.opcode.startswith(("copy", "slice-start", "transpose", "pad")):
        return "copy"
    products = [inside for inside, _ in within if inside.opcode in ("dot", "convolution")]
    if products:
        return "window" if all(_GROUPS.search(product.rest) for product in products) else "matrix"
    opcodes = {inside.opcode for inside, _ in within}
    if opcodes & {"reduce-window", "select-and-scatter"}:
        return "window"
    if opcodes & {"gather", "scatter"}:
        return "gather"
    if "reduce" in opcodes:
        return "reduction"
    if opcodes <= {"fusion", "parameter", "copy", "transpose", "bitcast", "reshape"}:
        return "copy"
    return "elementwise"


def find_layer(instruction: Instruction, step: LoweredStep, kind: str = "") -> str:
    """Returns the layer of an instruction, or a part of the step in parentheses."""
    path = step.find_layer_path(instruction.op_name)
    if path:
        return path
    if kind == "collective":
        return "(exchange outside layers)"
    if scope := step.find_scope(instruction.op_name):
        return f"({scope})"
    return _KEPT if _is_kept_by_loop(instruction.op_name) else _REST


def _is_kept_by_loop(op_name: str) -> bool:
    """Returns whether an op stores values of a loop's forward pass for its backward pass."""
    return (
        "/while/body/" in op_name
        and op_name.endswith("dynamic_update_slice")  # the op by which JAX stores a value
        and "jvp(" in op_name
        and "transpose(" not in op_name
    )


def list_within(
    module: Module, instruction: Instruction, computation: Computation
) -> list[tuple[Instruction, Computation]]:
    """Returns an instruction and all that it fuses, starts or awaits, with their computations."""
    found = [(instruction, computation)]
    start = find_start(instruction, computation)
    if start is not None and start is not instruction:
        found.append((start, computation))
    for outer, _ in found:
        for name in outer.called if outer.opcode in _RUN else ():
            inner = module.computations[name]
            found += [(inside, inner) for inside in inner.values()]
    return found
