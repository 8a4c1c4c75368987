"""One replica to compile for, and the compiler's cycles: shared by benchmarks of programs."""

from tftpu.preflight.pricing.cost import Cost
from tftpu.tpu.slices import Slice, parse_slice


class CompileError(Exception):
    """Raised with the compiler's message."""


class OneReplica(Slice):
    """The smallest slice of a generation, with one core working."""

    @property
    def replicas(self) -> int:
        return 1


def one_replica_of(generation: str) -> Slice:
    smallest = parse_slice({"v5e": "v5e-1", "v6e": "v6e-1"}.get(generation, f"{generation}-8"))
    return OneReplica(smallest.name, smallest.generation, smallest.shape)


def cycles_of(cost: Cost, target: Slice) -> float:
    """Returns the compiler's cycles, plus priced cycles for instructions without an estimate."""
    without = (p for p in cost.instructions if not (p.cycles or p.overlaps))
    return cost.cycles + sum(p.seconds for p in without) * target.generation.clock_ghz * 1e9
