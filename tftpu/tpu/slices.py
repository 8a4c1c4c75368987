"""The table of TPUs: what a chip can do, what it costs, and how Google names its slices.

Figures are a chip's, as the Cloud TPU documentation gives them
(https://cloud.google.com/tpu/docs/system-architecture-tpu-vm), unless a comment says otherwise.
"""

import dataclasses
import math
import re

from tftpu.errors import UserError, did_you_mean

PRICE_SOURCE = "public on-demand list price, US regions, 2026"
POWER_SOURCE = "mean power under training load, Patterson et al. 2021 (arXiv:2104.10350)"


@dataclasses.dataclass(frozen=True)
class Generation:
    """One chip of a TPU generation.

    Attributes:
        cores: TensorCores that libtpu compiles for one by one; each is a replica. (Of a v5p it
            joins the two.)
        counted: what the number in a slice's name counts for each chip: 2 cores, or 1 chip.
        clock_ghz: core clock; peak FLOPs over the FLOPs that the matrix units do in a cycle.
        tflops: bfloat16 peak.
        hbm_gbps: HBM bandwidth, GB/s.
        hbm_limit: bytes that a program on one core may use, as the compiler itself says when it
            runs out: less than what the chip has.
        link_gbps: one inter-chip link, one way, GB/s.
        usd_hour: a chip-hour on demand (`PRICE_SOURCE`).
        watts: mean power (`POWER_SOURCE`); None: not published.
    """

    name: str
    cores: int
    counted: int
    clock_ghz: float
    tflops: float
    hbm_gbps: float
    hbm_limit: int
    link_gbps: float
    usd_hour: float
    watts: float | None
    shapes: tuple[str, ...]  # the chips of each size that is sold, smallest first


def _gib(value: float) -> int:
    return int(value * 2**30)


_FLAT = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
_LITE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

# Links of v2 and v3: Jouppi et al. 2020 (CACM 63:7); of v4: Jouppi et al. 2023 (arXiv:2304.01433).
GENERATIONS = {
    g.name: g
    for g in (
        Generation("v2", 2, 2, 0.70, 46, 716, _gib(7.48), 62, 1.125, None, _FLAT),
        Generation(
            *("v3", 2, 2, 0.94, 123, 900, _gib(15.48), 82, 2.00, 220),
            (*_FLAT, "16x32", "32x32"),
        ),
        Generation("v4", 2, 2, 1.05, 275, 1200, _gib(15.25), 50, 3.22, 170, _CUBES),
        Generation("v5e", 1, 1, 1.50, 197, 819, _gib(15.75), 50, 1.20, None, _LITE),
        Generation("v5p", 1, 2, 1.75, 459, 2765, _gib(95.73), 100, 4.20, None, _CUBES),
        Generation("v6e", 1, 1, 1.75, 918, 1638, _gib(31.24), 100, 2.70, None, _LITE),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice: chips of one generation, and how they are wired."""

    name: str  # as Google writes it
    generation: Generation
    shape: str  # chips along each axis of the torus, "4x4"

    @property
    def chips(self) -> int:
        return math.prod(self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(int(axis) for axis in self.shape.split("x"))

    @property
    def replicas(self) -> int:
        """The devices that libtpu compiles for; each holds one share of the global batch."""
        return self.chips * self.generation.cores

    @property
    def topology(self) -> str:
        """What libtpu calls it."""
        return f"{self.generation.name}:{self.shape}"

    # Peaks of one replica.

    @property
    def flops_per_s(self) -> float:
        return self.generation.tflops * 1e12 / self.generation.cores

    @property
    def bytes_per_s(self) -> float:
        return self.generation.hbm_gbps * 1e9 / self.generation.cores


def parse_slice(name: str) -> Slice:
    """The slice of a name.

    Args:
        name: "v3-8", "v5e-8", "v5litepod-8", "v6e-256", …: the number counts cores for v2, v3, v4
            and v5p, and chips for v5e and v6e.

    Raises:
        UserError: no such generation, or a size that is not sold.
    """
    match = re.fullmatch(r"(v\d+[a-z]*)-(\d+)", name.strip())
    generation = match and GENERATIONS.get(match[1].replace("v5litepod", "v5e"))
    if not generation:
        known = [*GENERATIONS, "v5litepod"]
        hint = did_you_mean(match[1], known) if match else f" Allowed: {', '.join(known)}."
        raise UserError(
            f"{name!r} is not a TPU slice: write the generation and the size, as v3-8 or v5e-8."
            f"{hint}"
        )
    sizes = {
        math.prod(int(axis) for axis in shape.split("x")) * generation.counted: shape
        for shape in generation.shapes
    }
    size = int(match[2])
    if size not in sizes:
        unit = "cores" if generation.counted == 2 else "chips"
        raise UserError(
            f"There is no {name}: {generation.name} slices have "
            f"{', '.join(str(s) for s in sizes)} {unit}."
        )
    return Slice(f"{generation.name}-{size}", generation, sizes[size])


def parse_prices(text: str) -> dict[str, float]:
    """Prices of `--price=v5e=1.10,v3=1.50`: US dollars for a chip-hour, by generation.

    Raises:
        UserError: not of that form, or no such generation.
    """
    prices = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in GENERATIONS:
            raise UserError(
                f"--price={text}: there is no generation {name!r}.{did_you_mean(name, GENERATIONS)}"
            )
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = math.nan
        if not prices[name] >= 0:
            raise UserError(
                f"--price={text}: write dollars for a chip-hour, as --price={name}=1.10."
            )
    return prices
