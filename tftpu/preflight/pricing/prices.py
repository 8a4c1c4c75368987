"""Converts the compiler's cycles, FLOPs and bytes of an instruction to seconds.

The time of an instruction is the compiler's estimate of its cycles divided by the core clock, with
two corrections. They are needed because that estimate prices vector work and memory traffic alike
on every generation, although the chips differ:

    time = max(bytes / (bandwidth x HBM bandwidth), min(c, max(share x c, m / PRODUCT)))

where c is the cycles divided by the clock, m the FLOPs of its dots and convolutions divided by the
peak, and share the factor of its kind: `matrix`, `window`, or `vector` for all others.
Thus an instruction that keeps the matrix units at least half busy costs what the compiler
estimates, one that leaves them idle costs a part of that, which depends on its kind, and none takes
less time than its bytes need. Instructions without an estimate (kernels, some window operations)
are priced by their FLOPs and bytes.

In a clone of the repository, `python -m tests.benchmarks.calibration` fits the prices to published
runs. It also measures the error of predictions for each model by a fit without that model. No price
depends on the name of a model.
"""

import dataclasses
from typing import Literal

# fmt: off
Kind = Literal[
    "matrix", "window", "reduction", "gather", "elementwise", "copy",
    "kernel", "custom call", "collective", "host copy",
]
# fmt: on

PRODUCT = 0.5  # from this share of the peak FLOP/s on, the compiler's estimate is used


@dataclasses.dataclass(frozen=True)
class Prices:
    """The factors that correct the compiler's estimates.

    Attributes:
        bandwidth: share of the nominal HBM bandwidth that a good program sustains.
        matrix: share of the compiler's estimate that counts if an instruction with products leaves
            the matrix units idle.
        window: share for grouped convolutions, such as depthwise ones, and for pooling.
        vector: share for everything else: elementwise work, reductions, gathers and copies.
        kernel: share of the peak that products in a kernel reach.
        links: share of the nominal bandwidth that the links between chips sustain.
    """

    bandwidth: float
    matrix: float
    window: float
    vector: float
    kernel: float
    links: float

    def estimate_seconds(
        self, kind: str, estimate: float | None, products: float, traffic: float
    ) -> float:
        """Returns the time of an instruction that exchanges nothing with other devices.

        Args:
            kind: the kind of the instruction, a `Kind`.
            estimate: the compiler's estimate, in seconds; None if there is none.
            products: FLOPs over the peak, in seconds.
            traffic: bytes over the nominal bandwidth, in seconds.
        """
        floor = traffic / self.bandwidth
        if estimate is None:
            return max(products / self.kernel, floor)
        share = {"matrix": self.matrix, "window": self.window}.get(kind, self.vector)
        return max(min(estimate, max(share * estimate, products / PRODUCT)), floor)


PRICES = Prices(bandwidth=0.8, matrix=0.5, window=0.4, vector=0.5, kernel=0.5, links=1.0)


@dataclasses.dataclass(frozen=True)
class Basis:
    """The numbers of published times behind a generation's prices, and its predictions' range.

    Attributes:
        steps: number of train steps.
        models: number of models in these steps.
        operations: number of operations that were measured alone.
        low: the shortest time in the printed range, as a share of the prediction.
        high: the longest time in that range, likewise.
    """

    steps: int
    models: int
    operations: int
    low: float
    high: float


BASES = {
    "v2": Basis(1, 1, 0, 0.75, 1.25),
    "v3": Basis(8, 4, 0, 0.82, 1.18),
    "v4": Basis(5, 2, 0, 0.84, 1.16),
    "v5e": Basis(7, 2, 0, 0.84, 1.16),
    "v5p": Basis(6, 5, 0, 0.75, 1.25),
    "v6e": Basis(2, 2, 4, 0.84, 1.16),
    "tpu7x": Basis(1, 1, 15, 0.75, 1.25),
}
