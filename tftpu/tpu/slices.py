"""TPU generations and slices: performance, prices, names.

Figures are per chip and come from the Cloud TPU documentation
(https://cloud.google.com/tpu/docs/system-architecture-tpu-vm) unless a comment says otherwise.
"""

import dataclasses
import itertools
import math
import re

from tftpu.errors import UserError, did_you_mean

PRICE_SOURCE = "public on-demand list price, US regions, 2026"
POWER_SOURCE = "mean power under training load, Patterson et al. 2021 (arXiv:2104.10350)"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A TPU generation, described by one of its chips.

    Attributes:
        name: short name, such as "v5e".
        cores: devices that libtpu compiles for; each is a replica. A chip of v5p has two
            TensorCores, which libtpu joins into one device.
        counted: how much a chip adds to the number in a slice's name: 2 where the name counts
            cores, 1 where it counts chips.
        clock_ghz: core clock: peak FLOP/s divided by the FLOPs of all matrix units per cycle.
        tflops: bfloat16 peak, TFLOP/s.
        hbm_gbps: HBM bandwidth, GB/s.
        hbm_limit: bytes available to a program on one core, as the compiler reports them when it
            runs out of memory; less than the chip's HBM.
        link_gbps: bandwidth of one inter-chip link in one direction, GB/s.
        ring: an axis of a slice closes to a ring if its chips are a multiple of this. On v4 and
            v5p optical switches close cubes of 4 x 4 x 4; elsewhere an axis closes where it is as
            long as the pod.
        usd_hour: on-demand price of a chip-hour, US dollars (`PRICE_SOURCE`).
        watts: mean power (`POWER_SOURCE`); None if not published.
        shapes: chips along each axis of every slice on sale, smallest slice first.
        largest_host: chips of the largest slice that one host has; hosts of larger slices have 4.
    """

    name: str
    cores: int
    counted: int
    clock_ghz: float
    tflops: float
    hbm_gbps: float
    hbm_limit: int
    link_gbps: float
    ring: int
    usd_hour: float
    watts: float | None
    shapes: tuple[str, ...]
    largest_host: int = 4


def _gib(value: float) -> int:
    return int(value * 2**30)


_FLAT = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
_LITE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

# Link bandwidth: Jouppi et al. 2020 (CACM 63:7) for v2 and v3, Jouppi et al. 2023
# (arXiv:2304.01433) for v4.
GENERATIONS = {
    g.name: g
    for g in (
        Generation("v2", 2, 2, 0.70, 46, 716, _gib(7.48), 62, 16, 1.125, None, _FLAT),
        Generation(
            *("v3", 2, 2, 0.94, 123, 900, _gib(15.48), 82, 32, 2.00, 220),
            (*_FLAT, "16x32", "32x32"),
        ),
        Generation("v4", 2, 2, 1.05, 275, 1200, _gib(15.25), 50, 4, 3.22, 170, _CUBES),
        Generation("v5e", 1, 1, 1.50, 197, 819, _gib(15.75), 50, 16, 1.20, None, _LITE, 8),
        Generation("v5p", 1, 2, 1.75, 459, 2765, _gib(95.73), 100, 4, 4.20, None, _CUBES),
        Generation("v6e", 1, 1, 1.75, 918, 1638, _gib(31.24), 100, 16, 2.70, None, _LITE, 8),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: chips of one generation, connected as a torus.

    Attributes:
        name: Google's name, such as "v5e-8".
        generation: generation of the chips.
        shape: chips along each axis of the torus, such as "2x4".
    """

    name: str
    generation: Generation
    shape: str

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        """Number of chips along each axis of the torus."""
        return _axes(self.shape)

    def links(self, chips: int) -> int:
        """Returns how many of its links a chip can use at once to exchange with a group.

        Along an axis that closes to a ring there are two, along any other one: whoever stands at
        its end has no second. A group lies along the first axes that its size fits, as
        `jax.make_mesh` places it; one that fits none is a ring through the slice.

        Args:
            chips: size of the group, this chip included.
        """
        used = [axis for axis in self.axes if axis > 1]
        for count in range(1, len(used) + 1):
            for group in itertools.combinations(used, count):
                if math.prod(group) == chips:
                    return sum(2 if axis % self.generation.ring == 0 else 1 for axis in group)
        return min(2, max(1, chips - 1))

    @property
    def hosts(self) -> int:
        """Number of virtual machines, as Cloud TPU, GKE and Vertex AI rent the slice."""
        return self.chips // self.chips_per_host

    @property
    def chips_per_host(self) -> int:
        """Number of chips that are attached to one host."""
        return self.chips if self.chips <= self.generation.largest_host else 4

    @property
    def replicas(self) -> int:
        """Number of devices that libtpu compiles for; each holds one share of the global batch."""
        return self.chips * self.generation.cores

    @property
    def topology(self) -> str:
        """Name of the slice in libtpu, such as "v5e:2x4"."""
        return f"{self.generation.name}:{self.shape}"

    @property
    def flops_per_s(self) -> float:
        """Peak bfloat16 FLOP/s of one replica."""
        return self.generation.tflops * 1e12 / self.generation.cores

    @property
    def bytes_per_s(self) -> float:
        """HBM bandwidth of one replica, bytes/s."""
        return self.generation.hbm_gbps * 1e9 / self.generation.cores


def parse_slice(name: str) -> Slice:
    """Returns the slice with a name.

    Args:
        name: "v3-8", "v5e-8", "v5litepod-8", "v6e-256", …: the number counts cores for v2, v3, v4
            and v5p, and chips for v5e and v6e.

    Raises:
        UserError: there is no such generation, or no slice of this size, or several are asked for.
    """
    several = re.fullmatch(r"(\d+)x(v\d.*)", name.strip())
    if several:
        raise UserError(
            f"{name!r} asks for {several[1]} slices, and tftpu trains on one: write {several[2]}, "
            "or a larger slice."
        )
    match = re.fullmatch(r"(v\d+[a-z]*)-(\d+)", name.strip())
    known = [*GENERATIONS, "v5litepod"]
    if match is None or match[1] not in known:
        hint = did_you_mean(match[1], known) if match else f" Allowed: {', '.join(known)}."
        raise UserError(
            f"{name!r} is not a TPU slice: write the generation and the size, such as v3-8 or "
            f"v5e-8.{hint}"
        )
    generation = GENERATIONS[match[1].replace("v5litepod", "v5e")]
    sizes = {math.prod(_axes(shape)) * generation.counted: shape for shape in generation.shapes}
    size = int(match[2])
    if size not in sizes:
        unit = "cores" if generation.counted == 2 else "chips"
        raise UserError(
            f"There is no {name}: {generation.name} slices have "
            f"{', '.join(str(s) for s in sizes)} {unit}."
        )
    return Slice(f"{generation.name}-{size}", generation, sizes[size])


def _axes(shape: str) -> tuple[int, ...]:
    return tuple(int(axis) for axis in shape.split("x"))
