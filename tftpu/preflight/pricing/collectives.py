"""Estimates the time of a collective on a slice, and the part of it that other work hides.

An asynchronous collective starts at one instruction and ends at another, and the instructions
between them run meanwhile. The TPU compiler writes it either as a pair such as `all-gather-start`
and `all-gather-done`, or as fusions with one channel: the first starts it, the last ends it, and
those between, during which it continues, contain the work of other instructions.

Between slices the hosts exchange data over the data-centre network: the program passes them its
data with a `send`, and a `recv-done` waits for the sum. Such a pair has a name, its rendezvous.
"""

import collections
import math
import re

import numpy as np

from tftpu.preflight.pricing.prices import PRICES
from tftpu.preflight.program.hlo import Computation, Instruction
from tftpu.tpu.slices import Slice

HOP_SECONDS = 1e-6  # latency between neighbouring chips, in seconds
NETWORK_SECONDS = 1e-4  # latency of an exchange between hosts, in seconds

_OPCODES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Matches the names of two algorithms that use one ring, and so only two links of a chip.
_SINGLE_RING = re.compile(r'"emitter":"1DAllGather|"strategy":"StrategyRing"')
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'
Within = list[tuple[Instruction, Computation]]  # the type of the result of `list_within`


def is_collective(instruction: Instruction) -> bool:
    """Returns whether an instruction exchanges data between devices, or waits for it."""
    if instruction.opcode in ("send", "recv-done"):
        return is_between_slices(instruction)
    return instruction.opcode.startswith(_OPCODES)


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether an instruction belongs to an exchange over the network between slices."""
    return _BETWEEN_SLICES in instruction.rest


def find_key(instruction: Instruction, within: Within) -> str:
    """Returns the key of an instruction's collective: its rendezvous, channel or name."""
    for inside, computation in within:
        if inside is instruction and is_between_slices(instruction):
            named = computation[inside.operands[0]] if inside.opcode == "recv-done" else inside
            return named.match_attribute(_RENDEZVOUS)
        if is_collective(inside) and inside is not instruction:
            return inside.match_attribute(r"channel_id=(\d+)") or inside.name
    is_end = instruction.opcode.endswith("-done")
    return instruction.operands[0] if is_end and instruction.operands else instruction.name


def is_start(instruction: Instruction, within: Within) -> bool:
    """Returns whether an instruction starts an asynchronous collective."""
    # The work may begin with an async-update: see `program.asynchronous`.
    opcodes = ("-start", "async-update", "send")
    return instruction.opcode.endswith(opcodes) or _is_calling(within, "AsyncCollectiveStart")


def is_end(instruction: Instruction, within: Within) -> bool:
    """Returns whether an instruction waits for the end of an asynchronous collective."""
    return instruction.opcode.endswith("-done") or _is_calling(within, "AsyncCollectiveDone")


def estimate_seconds(instruction: Instruction, computation: Computation, target: Slice) -> float:
    """Returns the time of one collective, 0 for any other instruction.

    A reduce-scatter or an all-gather is half of an all-reduce, and costs half, as does an
    all-to-all.

    Args:
        instruction: the instruction.
        computation: the computation that contains it.
        target: the slice.
    """
    if not is_collective(instruction) or instruction.opcode.endswith("-done"):
        return 0.0
    size = _measure_size(instruction, computation)
    if instruction.opcode == "send":
        return _estimate_between_slices(size, target)
    if instruction.opcode.startswith("collective-permute"):
        return _estimate_permutation(instruction, size, target)
    chips, groups = _place_group(instruction, target)
    links = target.count_links(chips)
    if _SINGLE_RING.search(instruction.rest):
        links = min(links, 2)
    if chips > 1:
        whole = estimate_all_reduce(groups * size, target, chips, links)
    else:
        whole = size / (target.generation.core_gbps * 1e9) + HOP_SECONDS
    return whole if instruction.opcode.startswith("all-reduce") else whole / 2


def count_sent_bytes(instruction: Instruction, computation: Computation, target: Slice) -> float:
    """Returns the bytes that a chip sends in one collective, 0 for any other instruction.

    Args:
        instruction, computation, target: as for `estimate_seconds`.
    """
    if not is_collective(instruction) or instruction.opcode.endswith("-done"):
        return 0.0
    size = _measure_size(instruction, computation)
    if instruction.opcode.startswith("collective-permute"):
        turns = _count_turns(instruction, target)
        return size if turns is None else turns * size
    between = instruction.opcode == "send"
    parts, groups = (target.slices, 1) if between else _place_group(instruction, target)
    whole = 2 * groups * size * (parts - 1) / parts
    return whole if between or instruction.opcode.startswith("all-reduce") else whole / 2


def _measure_size(instruction: Instruction, computation: Computation) -> int:
    """Returns the bytes of a collective's input or output, whichever is larger."""
    if instruction.opcode == "send":
        return instruction.shape[0].bytes
    known = [computation[name] for name in instruction.operands if name in computation]
    operands = sum(tensor.bytes for operand in known for tensor in operand.shape)
    results = sum(tensor.bytes for tensor in instruction.shape)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        results -= operands  # these instructions return their operands as well
    return max(results, operands)


def _estimate_permutation(instruction: Instruction, size: int, target: Slice) -> float:
    """Returns the time of a permutation, assuming that chips send only to neighbouring chips.

    Transfers from several devices of a chip to the same other chip take turns on the link.
    """
    generation, turns = target.generation, _count_turns(instruction, target)
    if turns == 0:
        return size / (generation.core_gbps * 1e9) + HOP_SECONDS
    return (turns or 1) * size / _measure_links(target) + HOP_SECONDS


def _count_turns(instruction: Instruction, target: Slice) -> int | None:
    """Returns the largest number of devices of one chip that send to the same other chip.

    It is 0 if all transfers stay within chips, and None if the program does not list senders.
    """
    written = instruction.match_attribute(r"source_target_pairs=\{([\d,{}]*)\}")
    devices = [int(d) // target.generation.cores for d in re.findall(r"\d+", written)]
    links = collections.Counter(zip(devices[::2], devices[1::2], strict=True))
    if not links:
        return None
    return max((n for (source, to), n in links.items() if source != to), default=0)


def _place_group(instruction: Instruction, target: Slice) -> tuple[int, float]:
    """Returns the number of chips of a collective's group, and how many groups share each chip.

    Devices are numbered chip by chip. If a group has one of two devices of a chip, another group
    has the other, and exchanges over the same links at the same time.
    """
    devices = list_group(instruction) or range(target.single.replicas)
    cores = target.generation.cores
    chips = len({device // cores for device in devices})
    return chips, cores * chips / len(devices)


def estimate_all_reduce(size: float, target: Slice, chips: int, links: int) -> float:
    """Returns the time of an all-reduce over n chips.

    2 (n - 1) / n of the bytes pass each chip, spread over its links: along all axes of the torus
    at once, in both directions (Jouppi et al. 2023, arXiv:2304.01433). On a whole v5e pod this is
    the 200 GB/s per chip of Google's documentation.

    Args:
        size: bytes that each chip holds.
        target: the slice.
        chips: number of chips that take part.
        links: number of links of a chip that carry the exchange.
    """
    moved = 2 * size * (chips - 1) / chips
    hops = min(sum(target.axes), chips)
    return moved / (links * _measure_links(target)) + 2 * hops * HOP_SECONDS


def _measure_links(target: Slice) -> float:
    """Returns the bytes/s that a link between chips sustains in one direction."""
    return PRICES.links * target.generation.link_gbps * 1e9


def _estimate_between_slices(size: int, target: Slice) -> float:
    """Returns the time of an all-reduce of each device's array over the network.

    2 (n - 1) / n of the bytes leave each of n slices, which share the bandwidth of their hosts
    between their devices.
    """
    generation = target.generation
    moved = 2 * size * (target.slices - 1) / target.slices
    return moved / (generation.network_gbps / generation.cores * 1e9) + NETWORK_SECONDS


def list_group(instruction: Instruction) -> list[int]:
    """Returns the devices of the first group of a collective; [] if all form one group.

    HLO writes the groups as lists `{{0,1},{2,3}}`, as numbers and sizes `[2,4]<=[8]` or
    `[4,2]<=[2,4]T(1,0)`, or as axes of a mesh, `mesh['axis_0'=2,'axis_1'=4] {'axis_1'}`.
    """
    if lists := instruction.match_attribute(r"replica_groups=\{\{([\d,]+)\}"):
        return _read_numbers(lists)
    if tiles := re.search(
        r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.rest
    ):
        sizes = _read_numbers(tiles[2])
        order = _read_numbers(tiles[3]) if tiles[3] else range(len(sizes))
        devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return devices.ravel()[: int(tiles[1])].tolist()
    if mesh := re.search(
        r"replica_groups=(?:@\w+ )?mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest
    ):
        axes = re.findall(r"'([^']+)'=(\d+)", mesh[1])
        sizes = [int(size) for _, size in axes]
        along = re.findall(r"'([^']+)'", mesh[2])
        first = tuple(slice(None) if axis in along else 0 for axis, _ in axes)
        return np.arange(math.prod(sizes)).reshape(sizes)[first].ravel().tolist()
    return []


def _read_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


class Timeline:
    """The timeline of one run of a computation: its instructions, and concurrent exchanges.

    Exchanges over one link take turns, in the order in which they start. The links are "slice",
    "network" (between slices), `host_copies.LINK` and `instructions.SPARSE_CORE`.
    """

    def __init__(self) -> None:
        self._now = 0.0
        # For each link, the time from which it is free.
        self._free: dict[str, float] = collections.defaultdict(float)
        self._ends: dict[str, float] = {}

    def run(self, seconds: float) -> None:
        """Advances the timeline by an instruction that takes these seconds."""
        self._now += seconds

    def start(self, key: str, seconds: float, link: str = "slice") -> None:
        """Starts an asynchronous exchange.

        Args:
            key: identifies the exchange.
            seconds: the time that it takes.
            link: the link that carries it.
        """
        free = max(self._free[link], self._now) + seconds
        self._free[link] = self._ends[key] = free

    def is_running(self, key: str) -> bool:
        """Returns whether an exchange has been started and not yet waited for."""
        return key in self._ends

    def wait(self, key: str) -> float:
        """Waits for the end of an exchange; returns the seconds that the wait takes."""
        waited = max(0.0, self._ends.pop(key, self._now) - self._now)
        self._now += waited
        return waited


def _is_calling(within: Within, name: str) -> bool:
    target = f'custom_call_target="{name}"'
    return any(target in inside.rest for inside, _ in within if inside.opcode == "custom-call")
