"""Advice on a compiled step: the largest batch that fits, and layers that waste the chip."""

import dataclasses
import math
import re
from collections.abc import Callable

from tftpu.amounts import format_duration
from tftpu.engines.lowered import LoweredStep
from tftpu.errors import counted
from tftpu.preflight.pricing.cost import Cost
from tftpu.preflight.program.hlo import Module

LANES, SUBLANES = 128, 8  # columns and rows of a TPU's vector register, and of a tile in memory
MAX_COMPILES = 12  # maximum number of compilations in a search for the largest batch
ITERATIONS = 10_000  # a loop with fewer iterations is not worth advice
WORTH = 0.05  # a smaller share of the step's time is not worth advice about speed

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


@dataclasses.dataclass
class Lint:
    """A finding about a step.

    Attributes:
        layer: name of the layer, "" for the step itself.
        problem: what is slow or wrong.
        fix: what to change.
        step_share: fraction of the step's time spent in the layer, or only on the problem.
    """

    layer: str
    problem: str
    fix: str
    step_share: float = 0.0

    def __str__(self) -> str:
        where = f"layer {self.layer!r} ({self.step_share:.0%} of the step): " if self.layer else ""
        return f"{where}{self.problem}. {self.fix}."


def parse_memory_error(error: str) -> tuple[int, int] | None:
    """Parses the compiler's out-of-memory message.

    Args:
        error: the message.

    Returns:
        (bytes needed, bytes available), or None if the message does not state them.
    """
    for pattern in (
        rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)",
        rf"Used {_SIZE} of {_SIZE} hbm",
    ):
        match = re.search(pattern, error)
        if match:
            need, unit, limit, limit_unit = match.groups()
            return int(float(need) * _UNITS[unit]), int(float(limit) * _UNITS[limit_unit])
    return None


def batch_step(examples: int, unit: int | None) -> int:
    """Returns the step size, in examples, of the search for a batch that fits.

    Args:
        examples: the number of examples in a microbatch that does not fit.
        unit: a number of which every batch must be a multiple; None: any batch is allowed.
    """
    step = unit or next(n for n in (SUBLANES, 4, 2, 1) if n == 1 or 8 * n <= examples)
    while examples > 1024 * step:  # a batch that is 0.2 % off is exact enough
        step *= 2
    return step


def find_largest_batch(
    need: Callable[[int], tuple[bool, int]], failing: int, needs: int, limit: int, unit: int
) -> tuple[int, int]:
    """Finds the largest per-core batch that fits, by bisection with at most 12 compilations.

    Memory is nearly proportional to the batch, so the first guesses interpolate. Near the limit the
    compiler trades time for memory, so every guess is compiled.

    Args:
        need: a function of a per-core batch, which compiles the step with it and returns whether it
            fits and the bytes needed.
        failing: a batch that does not fit.
        needs: bytes that the failing batch needs.
        limit: bytes available.
        unit: a number of which the batch must be a multiple.

    Returns:
        The largest tried batch that fits (0 if none does), and the smallest that does not fit.
    """
    # Both count multiples of `unit`: a batch of `low` fits, a batch of `high` does not.
    low, high = 0, -(-failing // unit)
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
    return low * unit, min(high * unit, failing)


def _interpolate(points: dict[int, int], limit: int) -> int:
    """Returns the batch estimated to need `limit` bytes, given the bytes of some batches."""
    near = sorted(points, key=lambda p: abs(points[p] - limit))[:2]
    if len(near) < 2 or points[near[0]] == points[near[1]]:
        return int(near[0] * limit / max(points[near[0]], 1))
    (a, b), (at_a, at_b) = near, (points[near[0]], points[near[1]])
    return int(a + (limit - at_a) * (b - a) / (at_b - at_a))


def find_lints(step: LoweredStep, cost: Cost, microbatch: int) -> list[Lint]:
    """Returns avoidable causes of a slow step: first those in the whole step, then those in layers.

    Args:
        step: the step before compilation.
        cost: cost of the step on one slice.
        microbatch: examples in a microbatch of one replica.
    """
    by_layer = cost.group_by("layer")
    total = sum(seconds for _, seconds, _ in by_layer) or 1.0
    shares = {layer: seconds / total for layer, seconds, _ in by_layer}
    layers = [
        *_find_wasted_lanes(step, shares),
        *_find_float32_products(step, _compute_product_shares(cost, total)),
        *_find_augmentation(step, shares),
        *_find_grouped_convolutions(step, shares),
        *_find_short_iterations(cost, total),
    ]
    layers.sort(key=lambda item: -item.step_share)
    of_program = [*_find_uncounted_loops(cost), *_find_silent_kernels(cost)]
    return [
        *of_program,
        *_find_partial_tiles(step, microbatch),
        *_find_emulated_float16(step),
        *layers,
    ]


def _find_uncounted_loops(cost: Cost) -> list[Lint]:
    if not cost.uncounted_loops:
        return []
    count = counted(len(cost.uncounted_loops), "loop")
    fix = "Give each loop a constant bound, such as maximum_iterations of keras.ops.while_loop"
    text = f"The step has {count} of unknown trip count, each priced as a single iteration"
    return [Lint("", f"{text}: the predicted time and work are too low", fix)]


def _find_silent_kernels(cost: Cost) -> list[Lint]:
    if not cost.silent_kernels:
        return []
    where = ", ".join(repr(layer) for layer in cost.silent_kernels)
    text = f"The work of kernels in {where} is not priced, because they do not state their FLOPs"
    return [Lint("", text, "Give a cost_estimate to pallas_call")]


def _find_partial_tiles(step: LoweredStep, microbatch: int) -> list[Lint]:
    padded = -(-microbatch // SUBLANES) * SUBLANES
    # With attention, rows of matrix products are tokens, so a small batch can fill the tiles.
    by_token = any("Attention" in kind for kind in step.layers.values())
    if by_token or 1 - microbatch / padded < WORTH:
        return []
    return [
        Lint(
            "",
            f"A microbatch of {microbatch} examples does not fill tiles of {SUBLANES}: up to "
            f"{1 - microbatch / padded:.0%} of the work is padding",
            f"Use a multiple of {SUBLANES} per core, such as {padded}",
        )
    ]


def _find_emulated_float16(step: LoweredStep) -> list[Lint]:
    if step.precision != "mixed_float16":
        return []
    fix = "Use mixed_bfloat16, which is native and needs no loss scale"
    return [Lint("", "float16 is emulated on a TPU", fix)]


def _find_wasted_lanes(step: LoweredStep, shares: dict[str, float]) -> list[Lint]:
    """Finds layers whose number of features leaves 20 % or more of the lanes empty.

    Only the largest kernel of a layer is checked, as an adapter's small kernels cost little. The
    number of features of a model's output is accepted, as the labels determine it.
    """
    outputs = {
        tensor.dims[-1]
        for instruction in Module(step.forward).entry.values()
        for tensor in instruction.shape
        if instruction.root and tensor.dims
    }
    largest: dict[str, tuple[int, ...]] = {}
    for name, dims in step.kernels.items():
        layer = "/".join(scope for scope in name.split("/") if scope in step.layers)
        largest[layer] = max(largest.get(layer, ()), dims, key=math.prod)
    found = []
    for layer, dims in largest.items():
        features = dims[-1]
        padded = -(-features // LANES) * LANES
        waste = 1 - features / padded
        if waste >= 0.2 and shares.get(layer, 0.0) >= WORTH and features not in outputs:
            found.append(
                Lint(
                    layer,
                    f"{features} features leave {waste:.0%} of the {LANES} lanes empty",
                    f"If the model may change, use {padded} features",
                    shares[layer],
                )
            )
    return found


def _compute_product_shares(cost: Cost, total: float) -> dict[str, float]:
    """Returns the share of the step's time that the matrix products of each layer take."""
    found: dict[str, float] = {}
    for priced in cost.instructions:
        if priced.kind in ("matrix", "window"):
            found[priced.layer] = found.get(priced.layer, 0.0) + priced.seconds / total
    return found


def _find_float32_products(step: LoweredStep, shares: dict[str, float]) -> list[Lint]:
    """Finds layers with matrix products in float32, if the model's policy is mixed_bfloat16."""
    if step.precision != "mixed_bfloat16":
        return []
    module = Module(step.forward)
    layers = {
        step.find_layer_path(instruction.op_name)
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode in ("dot", "convolution") and instruction.shape[0].dtype == "f32"
    }
    return [
        Lint(
            layer,
            "its matrix products are in float32 under a bfloat16 policy",
            "Remove its dtype='float32', or cast its result instead of its inputs",
            shares[layer],
        )
        for layer in sorted(layers)
        if shares.get(layer, 0.0) >= WORTH
    ]


def _find_augmentation(step: LoweredStep, shares: dict[str, float]) -> list[Lint]:
    return [
        Lint(
            name,
            f"{kind} augments the data inside the step, so the TPU does this work while the host "
            "is idle",
            "Move it to the input pipeline (tf.data)",
            shares.get(name, 0.0),
        )
        for name, kind in step.layers.items()
        if kind.startswith("Random") and shares.get(name, 0.0) >= WORTH
    ]


def _find_grouped_convolutions(step: LoweredStep, shares: dict[str, float]) -> list[Lint]:
    return [
        Lint(
            name,
            "Keras wraps a grouped convolution in a nested XLA function, which fails on TPU hosts",
            "Use DepthwiseConv2D, or one Conv2D per group",
            shares.get(name, 0.0),
        )
        for name in step.grouped
    ]


def _find_short_iterations(cost: Cost, total: float) -> list[Lint]:
    """Finds layers that lose time to loops of many short iterations, such as a scatter's."""
    spent: dict[tuple[str, str, int], float] = {}
    for priced in cost.instructions:
        if priced.times >= ITERATIONS:
            key = priced.layer, priced.op_name.split("/")[-1], priced.times
            spent[key] = spent.get(key, 0.0) + priced.seconds
    return [
        Lint(
            layer,
            f"{op or 'a loop'} runs as {times:,} iterations of {format_duration(seconds / times)}, "
            "one after the other",
            "Use another op, such as nearest-neighbour instead of bilinear resizing, or a "
            "transposed convolution, or loops with more work in each iteration",
            seconds / total,
        )
        for (layer, op, times), seconds in spent.items()
        if seconds / total >= WORTH
    ]
