"""Preflight reports with chosen figures, for tests that compare or draw them."""

from tftpu.preflight.plots import Exchange, MemoryCurve, Plots, RooflinePoint
from tftpu.preflight.pricing.cost import LargeTensor
from tftpu.preflight.program.lifetimes import Loop
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, Spent
from tftpu.tpu.slices import parse_slice

MIB = 2**20


def written(
    slice_name: str = "v3-8", layers: dict[str, float] | None = None, **figures: object
) -> SliceReport:
    """Returns the report of a slice.

    Args:
        slice_name: the slice.
        layers: milliseconds by layer; their sum is the step.
        figures: other fields of the report.
    """
    target = parse_slice(slice_name)
    layers = layers or {"dense": 3.0, "head": 1.0}
    step = sum(layers.values())
    spent = [Spent(name, ms, ms / step, 1000) for name, ms in layers.items()]
    fields = {
        "per_core_batch": 16,
        "compiles": True,
        "fits": True,
        "hbm_bytes": 400 * MIB,
        "hbm_limit_bytes": target.generation.hbm_limit,
        "hbm": {"arguments": 90 * MIB, "temporaries": 300 * MIB, "code": 10 * MIB},
        "step_ms": step,
        "step_ms_low": 0.9 * step,
        "step_ms_high": 1.1 * step,
        "collective_ms": 0.5,
        "examples_per_second": 1e6 / step,
        "mfu": 0.4 / step,
        "bound": "memory",
        "usd_per_1000_steps": 0.001 * step,
        "by_layer": spent,
        "by_kind": [Spent("matrix", step, 1.0, 1000)],
        "plots": plots(),
    }
    return SliceReport(slice_name, target.replicas, **{**fields, **figures})


def plots() -> Plots:
    """Returns plots of a step whose memory peaks at the second of four places."""
    curve = MemoryCurve(
        instructions=40,
        base=100 * MIB,
        held={"weights": 30 * MIB, "optimizer": 60 * MIB},
        bytes=[100 * MIB, 400 * MIB, 200 * MIB, 100 * MIB],
        layers=["dense", "dense", "head", "(optimizer)"],
        arrays=[LargeTensor("bf16[128,56,56,64]", 196 * MIB, 98 * MIB, "dense")],
        loops=[Loop(1, 2, 12)],
    )
    points = [
        RooflinePoint("fusion.1", "dense", "matrix", 10**10, 10**8, 2.0),
        RooflinePoint("fusion.2", "head", "matrix", 10**9, 0, 0.5),
    ]
    exchanges = [Exchange("all-reduce", "(exchange outside layers)", 2, 5e6, 2.0, 0.5)]
    return Plots(curve, points, exchanges)


def report(*slices: SliceReport, global_batch_size: int = 128) -> Report:
    """Returns a report of slices."""
    return Report(global_batch_size, "mixed_bfloat16", 1000, list(slices))
