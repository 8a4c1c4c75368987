"""The compiler's cycles of a step, completed where it makes no estimate."""

from tftpu.preflight.pricing.cost import Cost
from tftpu.tpu.slices import Slice


def cycles_of(cost: Cost, target: Slice) -> float:
    """Returns the compiler's cycles, plus priced cycles for instructions without an estimate."""
    without = (p for p in cost.instructions if not (p.cycles or p.overlaps))
    return cost.cycles + sum(p.seconds for p in without) * target.generation.clock_ghz * 1e9
