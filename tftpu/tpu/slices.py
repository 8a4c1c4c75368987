"""TPU generations and slices: performance, prices, names.

Figures are per chip and come from the Cloud TPU documentation
(https://cloud.google.com/tpu/docs/system-architecture-tpu-vm) unless a comment says otherwise.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable

from tftpu.errors import UserError, find_nearest

PRICE_SOURCE = "public on-demand list price, US regions, 2026"
POWER_SOURCE = "mean power under training load, Patterson et al. 2021 (arXiv:2104.10350)"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A TPU generation, described by one of its chips.

    Attributes:
        name: short name, such as "v5e".
        cores: devices of a chip; each is a replica. The two TensorCores of a chip of v4 and v5p
            work as one device, a "megacore"; those of v2, v3 and tpu7x are two devices.
        counted: how much a chip adds to the number in a slice's name: 2 where the name counts
            cores, 1 where it counts chips.
        clock_ghz: core clock: peak FLOP/s divided by the FLOPs of all matrix units per cycle.
        tflops: bfloat16 peak, TFLOP/s.
        hbm_gbps: HBM bandwidth, GB/s.
        hbm_limit: bytes available to a program on one core, as the compiler reports them when it
            runs out of memory; less than the chip's HBM.
        link_gbps: bandwidth of one inter-chip link in one direction, GB/s.
        ring: an axis of a slice forms a ring if its number of chips is a multiple of this. On v4,
            v5p and tpu7x, where optical switches join cubes of 4 x 4 x 4, all axes must be such
            multiples; elsewhere only an axis as long as the pod forms a ring.
        network_gbps: a chip's share of its host's bandwidth into the data-centre network, GB/s.
        host_gbps: a chip's bandwidth to its host's memory, in one direction, GB/s.
        usd_hour: on-demand price of a chip-hour, US dollars (`PRICE_SOURCE`).
        watts: mean power (`POWER_SOURCE`); None if not published.
        shapes: chips along each axis of every slice on sale, smallest slice first.
        largest_host: chips of the largest slice that one host has; hosts of larger slices have 4.
        chip_config: libtpu's name for the mode in which a chip's cores work; empty: libtpu's
            default.
        supports_tensorflow: whether TensorFlow can use the chip; JAX can use every one.
        core_gbps: bandwidth between the two devices of a chip in one direction, GB/s; infinite
            where it is not known.
        host_gb: memory of a host for each of its chips, GB; None where no source was found.
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
    network_gbps: float
    host_gbps: float
    usd_hour: float
    watts: float | None
    shapes: tuple[str, ...]
    largest_host: int = 4
    chip_config: str = ""
    supports_tensorflow: bool = True
    core_gbps: float = math.inf
    host_gb: float | None = None


def _to_gib(value: float) -> int:
    return int(value * 2**30)


_FLAT = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
_LITE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

# Sources. Link bandwidth: Jouppi et al. 2020 (CACM 63:7) for v2 and v3, Jouppi et al. 2023
# (arXiv:2304.01433) for v4. Network: for v5e and v6e, the documented bandwidth of a pod divided by
# its chips; for tpu7x, the documented one of a chip; for the others, 100 or 200 Gbit/s for the four
# chips of a host. Host: assumed to be 16 lanes of PCIe 3, and PCIe 4 for v6e and tpu7x. Its memory:
# that of the machine types ct5lp-hightpu (48 GB a chip, https://cloud.google.com/tpu/docs/v5e) and
# ct6e-standard (176 GB with one chip, 1,440 GB with eight).
_ALONE = ("v2", "v3")  # slices of these generations cannot be joined by a network
GENERATIONS = {
    g.name: g
    for g in (
        Generation("v2", 2, 2, 0.70, 46, 716, _to_gib(7.48), 62, 16, 3.1, 16, 1.125, None, _FLAT),
        Generation(
            *("v3", 2, 2, 0.94, 123, 900, _to_gib(15.48), 82, 32, 3.1, 16, 2.00, 220),
            (*_FLAT, "16x32", "32x32"),
        ),
        Generation(
            "v4",
            1,
            2,
            1.05,
            275,
            1200,
            _to_gib(30.75),
            50,
            4,
            3.1,
            16,
            3.22,
            170,
            _CUBES,
            4,
            "megacore",
        ),
        Generation(
            *("v5e", 1, 1, 1.50, 197, 819, _to_gib(15.75), 50, 16, 3.1, 16, 1.20, None, _LITE, 8),
            host_gb=48,
        ),
        Generation(
            "v5p", 1, 2, 1.75, 459, 2765, _to_gib(95.73), 100, 4, 6.2, 16, 4.20, None, _CUBES
        ),
        Generation(
            *("v6e", 1, 1, 1.75, 918, 1638, _to_gib(31.24), 100, 16, 12.5, 32, 2.70, None, _LITE),
            *(8,),
            host_gb=176,
        ),
        Generation(
            *("tpu7x", 2, 2, 2.20, 2307, 7380, _to_gib(94.74), 100, 4, 12.5, 32, 12.00, None),
            _CUBES,
            supports_tensorflow=False,
            core_gbps=600,  # according to Google, six times the bandwidth of an ICI link
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: chips of one generation, connected as a torus; or several, joined by a network.

    Attributes:
        name: Google's name, such as "v5e-8", or with a number of slices, "2xv5e-256". For tpu7x,
            whose slices Google names by their shape, the name in its tools xpk and MaxText.
        generation: generation of the chips.
        shape: chips along each axis of the torus, such as "2x4".
        slices: number of such slices, which the data-centre network joins.
    """

    name: str
    generation: Generation
    shape: str
    slices: int = 1

    @property
    def chips(self) -> int:
        """Number of chips, of all slices."""
        return self.slices * self.chips_per_slice

    @property
    def chips_per_slice(self) -> int:
        """Number of chips that one torus connects."""
        return math.prod(self.axes)

    @property
    def single(self) -> "Slice":
        """One of the joined slices; the slice itself if there is only one."""
        if self.slices == 1:
            return self
        return dataclasses.replace(self, name=self.name.partition("x")[2], slices=1)

    @property
    def axes(self) -> tuple[int, ...]:
        """Number of chips along each axis of the torus."""
        return _parse_axes(self.shape)

    def count_links(self, chips: int) -> int:
        """Returns the number of links that a chip can use at once in collectives of a group.

        An axis that forms a ring adds two, any other axis one, because chips at its ends have no
        second link. A group lies along the first axes whose product is its size, as `jax.make_mesh`
        places it; a group that fits no axes is a ring through the slice.

        Args:
            chips: size of the group, this chip included.
        """
        used = [axis for axis in self.axes if axis > 1]
        for count in range(1, len(used) + 1):
            for group in itertools.combinations(used, count):
                if math.prod(group) == chips:
                    return sum(2 if self._is_closed(axis) else 1 for axis in group)
        return min(2, max(1, chips - 1))

    def _is_closed(self, axis: int) -> bool:
        ring, is_cube = self.generation.ring, len(self.axes) == 3
        return all(a % ring == 0 for a in self.axes) if is_cube else axis % ring == 0

    @property
    def hosts(self) -> int:
        """Number of virtual machines, as Cloud TPU, GKE and Vertex AI rent them."""
        return self.chips // self.chips_per_host

    @property
    def chips_per_host(self) -> int:
        """Number of chips that are attached to one host."""
        chips = self.chips_per_slice
        return chips if chips <= self.generation.largest_host else 4

    @property
    def host_limit(self) -> int | None:
        """Bytes of a host's memory for each of its devices; None if it is not known."""
        gb = self.generation.host_gb
        return None if gb is None else int(gb * 1e9 / self.generation.cores)

    @property
    def replicas(self) -> int:
        """Number of devices that libtpu compiles for.

        Without a mesh, each gets one shard of the global batch.
        """
        return self.chips * self.generation.cores

    @property
    def topology(self) -> str:
        """Name of one slice in libtpu, such as "v5e:2x4"."""
        return f"{self.generation.name}:{self.shape}"

    @property
    def flops_per_s(self) -> float:
        """Peak bfloat16 FLOP/s of one replica."""
        return self.generation.tflops * 1e12 / self.generation.cores

    @property
    def bytes_per_s(self) -> float:
        """HBM bandwidth of one replica, bytes/s."""
        return self.generation.hbm_gbps * 1e9 / self.generation.cores


ALIASES = {"v5litepod": "v5e"}  # generations under other names in Google's names of slices
_OTHER_NAMES = {"v5lite": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}  # unused in slices' names


def parse_slice(name: str) -> Slice:
    """Returns the slice with the given name.

    Args:
        name: "v3-8", "v5e-8", "v5litepod-8", "v6e-256", "tpu7x-8", …: the number counts cores for
            v2, v3, v4, v5p and tpu7x, and chips for v5e and v6e. "2xv5e-256" are two slices.

    Raises:
        UserError: the generation is unknown, or there is no such slice.
    """
    several = re.fullmatch(r"([0-9]{1,4})[xX]([a-zA-Z].*)", name.strip())
    if several:
        one, count = parse_slice(several[2]), int(several[1])
        if count > 1 and one.generation.name in _ALONE:
            raise UserError(
                f"There is no {name}, because slices of {one.generation.name} are not joined by a "
                "network. Slices of v4 and later are."
            )
        if count < 1:
            raise UserError(f"{name!r} names no slices: write {one.name}, or 2x{one.name}.")
        return (
            one
            if count == 1
            else dataclasses.replace(one, name=f"{count}x{one.name}", slices=count)
        )
    match = re.fullmatch(r"((?:v|tpu)\d+[a-z]*)-(\d+)", name.strip())
    known = [*GENERATIONS, *ALIASES]
    if match is None or match[1] not in known:
        raise UserError(
            f"{name!r} is not a TPU slice: write the generation and the size, such as v3-8 or "
            f"v5e-8.{_suggest(name)}"
        )
    generation = GENERATIONS[ALIASES.get(match[1], match[1])]
    sizes = {
        math.prod(_parse_axes(shape)) * generation.counted: shape for shape in generation.shapes
    }
    size = int(match[2])
    if size not in sizes:
        unit = "cores" if generation.counted == 2 else "chips"
        raise UserError(
            f"There is no {name}: {generation.name} slices have "
            f"{', '.join(str(s) for s in sizes)} {unit}.{_suggest_sizes(generation, size, sizes)}"
        )
    return Slice(f"{generation.name}-{size}", generation, sizes[size])


def list_names() -> list[str]:
    """Returns the names of all slices, one for each size of a generation."""
    return [
        _format_name(generation, shape)
        for generation in GENERATIONS.values()
        for shape in generation.shapes
    ]


def _format_name(generation: Generation, shape: str) -> str:
    return f"{generation.name}-{math.prod(_parse_axes(shape)) * generation.counted}"


def _suggest_sizes(generation: Generation, size: int, sizes: Iterable[int]) -> str:
    """Returns a sentence that suggests the next smaller and larger slices, the nearest first."""
    near = [*[s for s in sizes if s < size][-1:], *[s for s in sizes if s > size][:1]]
    near.sort(key=lambda s: abs(s - size))
    return f" Did you mean {' or '.join(repr(f'{generation.name}-{s}') for s in near)}?"


def _suggest(name: str) -> str:
    """Returns a sentence with the slice of the nearest name, or with all generations."""
    known = {_simplify(slice_name): slice_name for slice_name in list_names()}
    for generation in GENERATIONS.values():  # also by shape, such as xpk's tpu7x-2x2x1 for tpu7x-8
        for shape in generation.shapes:
            known[_simplify(f"{generation.name}-{shape}")] = _format_name(generation, shape)
    begun = re.match(r".+-\d+(?=\D+$)", name.strip())  # finds v6e-8 in v6e-8x
    if begun and begun[0] in known.values():
        return f" Did you mean {begun[0]!r}?"
    given = _simplify(name)
    number = re.search(r"\d", given)  # generations must match: v8-8 is not close to v4-8
    near = find_nearest(given, [k for k in known if number and k.startswith(number[0])])
    if near is None:
        return f" The generations are {', '.join([*GENERATIONS, *ALIASES])}."
    return f" Did you mean {known[near]!r}?"


def _simplify(name: str) -> str:
    """Returns a normalized name: "7x8" for tpu7x-8, v7x-8, TPU7x8 and ironwood-8."""
    simple = name.lower()
    for other, generation in (ALIASES | _OTHER_NAMES).items():
        simple = simple.replace(other, generation)
    return re.sub(r"tpu|v|[-_ ]", "", simple)


def _parse_axes(shape: str) -> tuple[int, ...]:
    return tuple(int(axis) for axis in shape.split("x"))
