"""What to do about it: a batch that fits, and the layers that waste the chip."""

import dataclasses
import re
from collections.abc import Callable

from tftpu.preflight.cost import Cost
from tftpu.preflight.hlo import Module, layer_path
from tftpu.preflight.lower import Program

LANES, SUBLANES = 128, 8  # of a vector register, and of a tile in memory
MAX_COMPILES = 12  # of one search for the largest batch

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


@dataclasses.dataclass
class Lint:
    """One finding: which layer ("" for the whole step), what is wrong, how to mend it."""

    layer: str
    problem: str
    mend: str
    step_share: float = 0.0  # of the step's time that the layer takes

    def __str__(self) -> str:
        where = f"layer {self.layer!r} ({self.step_share:.0%} of the step): " if self.layer else ""
        return f"{where}{self.problem}. {self.mend}."


def memory_wanted(error: str) -> tuple[int, int] | None:
    """Bytes that a program needs and bytes that there are, from the compiler's own message.

    Args:
        error: what the compiler said when it ran out of memory.

    Returns:
        None if the message gives no figures.
    """
    for pattern in (
        rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)",
        rf"Used {_SIZE} of {_SIZE} hbm",
    ):
        match = re.search(pattern, error)
        if match:
            need, unit, there, there_unit = match.groups()
            return int(float(need) * _UNITS[unit]), int(float(there) * _UNITS[there_unit])
    return None


def largest_batch(
    need: Callable[[int], tuple[bool, int]], failing: int, needs: int, limit: int, unit: int
) -> tuple[int, int]:
    """The largest per-core batch that fits, by bisection.

    Memory grows nearly in proportion to the batch, so the first guesses interpolate; but near the
    limit the compiler trades time for memory, so only compiling tells.

    Args:
        need: compiles at a batch; says whether it fits, and the bytes that it needs.
        failing: a batch that does not fit.
        needs: the bytes that it needs.
        limit: the bytes that there are.
        unit: the batch is a multiple of this.

    Returns:
        The largest batch that compiled (0: none did) and the smallest that did not.
    """
    low, high = 0, -(-failing // unit)  # in units; low fits, high does not
    points = {high: needs}
    halved = True
    for _ in range(MAX_COMPILES):
        width = high - low
        if width <= 1:
            break
        guess = _interpolate(points, limit) if halved else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        fits, points[guess] = need(guess * unit)
        low, high = (guess, high) if fits else (low, guess)
        halved = 2 * (high - low) <= width + 1
    return low * unit, high * unit


def _interpolate(points: dict[int, int], limit: int) -> int:
    """Where the straight line through the two points nearest to the limit crosses it."""
    near = sorted(points, key=lambda p: abs(points[p] - limit))[:2]
    if len(near) < 2 or points[near[0]] == points[near[1]]:
        return int(near[0] * limit / max(points[near[0]], 1))
    (a, b), (at_a, at_b) = near, (points[near[0]], points[near[1]])
    return int(a + (limit - at_a) * (b - a) / (at_b - at_a))


def lint(program: Program, cost: Cost, microbatch: int) -> list[Lint]:
    """What slows a step down for no good reason, the costliest layer first.

    Args:
        program: the step as it was lowered.
        cost: of the step on one slice.
        microbatch: examples of one microbatch on one replica.
    """
    total = sum(seconds for _, seconds, _ in cost.by("layer")) or 1.0
    shares = {layer: seconds / total for layer, seconds, _ in cost.by("layer")}
    found = [
        *_wasted_lanes(program, shares),
        *_float32_products(program, shares),
        *_augmentation(program, shares),
        *(
            Lint(
                name,
                "a grouped convolution, which Keras wraps in a nested XLA function that fails on "
                "TPU hosts",
                "Write it as DepthwiseConv2D, or as one Conv2D for each group",
                shares.get(name, 0.0),
            )
            for name in program.grouped
        ),
    ]
    found.sort(key=lambda item: -item.step_share)
    if program.precision == "mixed_float16":
        found.insert(
            0,
            Lint("", "float16 is emulated on a TPU", "Use mixed_bfloat16: native, no loss scale"),
        )
    if microbatch % SUBLANES:
        padded = -(-microbatch // SUBLANES) * SUBLANES
        found.insert(
            0,
            Lint(
                "",
                f"{microbatch} examples a microbatch do not fill tiles of {SUBLANES}: up to "
                f"{1 - microbatch / padded:.0%} of the work is on padding",
                f"Use a multiple of {SUBLANES} on each core, as {padded}",
            ),
        )
    return found


def _wasted_lanes(program: Program, shares: dict[str, float]) -> list[Lint]:
    """Layers whose features do not fill the 128 lanes, if they take 3 % of the step or more."""
    found = []
    for name, dims in program.kernels.items():
        layer = _layer_of_variable(name, program)
        features = dims[-1]
        padded = -(-features // LANES) * LANES
        waste = 1 - features / padded
        if waste >= 0.2 and shares.get(layer, 0.0) >= 0.03:
            found.append(
                Lint(
                    layer,
                    f"{features} features leave {waste:.0%} of the {LANES} lanes empty",
                    f"Use a multiple of {LANES}, as {padded}, if the model may change",
                    shares[layer],
                )
            )
    return found


def _float32_products(program: Program, shares: dict[str, float]) -> list[Lint]:
    """Layers whose matrix products were written in float32, if they take 1 % of the step."""
    if program.precision != "mixed_bfloat16":
        return []
    module = Module(program.forward)
    layers = {
        layer_path(instruction.op_name, program.layers)
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode in ("dot", "convolution") and instruction.shape[0].dtype == "f32"
    }
    return [
        Lint(
            layer,
            "its matrix products are in float32 under a bfloat16 policy",
            "Leave out its dtype='float32', or cast its result instead of its inputs",
            shares[layer],
        )
        for layer in sorted(layers)
        if shares.get(layer, 0.0) >= 0.01
    ]


def _augmentation(program: Program, shares: dict[str, float]) -> list[Lint]:
    return [
        Lint(
            name,
            f"{kind} augments the data within the step: the TPU does it, again for every example, "
            "while the host is idle",
            "Move it to the input pipeline (tf.data)",
            shares.get(name, 0.0),
        )
        for name, kind in program.layers.items()
        if kind.startswith("Random")
    ]


def _layer_of_variable(name: str, program: Program) -> str:
    return "/".join(scope for scope in name.split("/") if scope in program.layers)
