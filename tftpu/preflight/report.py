"""The report: a dataclass, JSON, and a table for the terminal."""

import dataclasses
import io
import json
import math

from rich.console import Console
from rich.table import Table

from tftpu.preflight import cost as costs
from tftpu.tpu.slices import POWER_SOURCE, PRICE_SOURCE, Slice


@dataclasses.dataclass
class Spent:
    """A layer, a kind of work, or an instruction, with its part of the step."""

    name: str
    ms: float
    step_share: float
    cycles: int
    layer: str = ""


@dataclasses.dataclass
class SliceReport:
    """One slice; figures are one replica's, of one step, unless the name says otherwise.

    Attributes:
        compiles: False: the step cannot be compiled for this slice at all; `error` says why.
        fits: it compiled within the memory.
        hbm_bytes: arguments + outputs - aliased + temporaries + code; what was asked for if it
            does not fit.
        largest_per_core_batch: where it does not fit: the largest that compiled. 0: none did.
        flops: of the program's dots and convolutions, loops multiplied out.
        model_flops: 3 x the forward pass's products with weights.
        mfu: model FLOPs over what the chip's bfloat16 peak would do in the predicted time.
        estimated_cycles: the compiler's, loops multiplied out, before the calibration.
        roofline_ms: peak FLOPs or bandwidth, whichever takes longer: no program is faster.
        usd_per_1000_steps: of the whole slice, as are the other dollars, hours and kWh.
    """

    slice: str
    replicas: int
    per_core_batch: int = 0
    compiles: bool = False
    fits: bool = False
    error: str = ""
    compile_seconds: float = 0.0
    hbm_bytes: int = 0
    hbm_limit_bytes: int = 0
    hbm: dict[str, int] = dataclasses.field(default_factory=dict)
    largest_tensors: list[costs.LargeTensor] = dataclasses.field(default_factory=list)
    largest_per_core_batch: int | None = None
    smallest_failing_batch: int | None = None
    step_ms: float | None = None
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    roofline_ms: float | None = None
    collective_ms: float | None = None
    examples_per_second: float | None = None
    flops: int = 0
    model_flops: int = 0
    mfu: float | None = None
    bytes_accessed: int = 0
    arithmetic_intensity: float | None = None  # FLOPs a byte
    bound: str = ""  # "compute" or "memory"
    estimated_cycles: int = 0
    usd_per_1000_steps: float | None = None
    usd_per_epoch: float | None = None
    usd_per_run: float | None = None
    hours_per_run: float | None = None
    kwh_per_run: float | None = None
    by_layer: list[Spent] = dataclasses.field(default_factory=list)
    by_kind: list[Spent] = dataclasses.field(default_factory=list)
    top_instructions: list[Spent] = dataclasses.field(default_factory=list)
    lints: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """One model on one or several slices."""

    global_batch_size: int
    precision: str
    steps: int | None
    slices: list[SliceReport]

    @property
    def cheapest(self) -> SliceReport | None:
        """Of the slices that the step fits on, the one on which the run costs least."""
        return min(self._fitting(), key=lambda s: s.usd_per_1000_steps, default=None)

    @property
    def fastest(self) -> SliceReport | None:
        return min(self._fitting(), key=lambda s: s.step_ms, default=None)

    def _fitting(self) -> list[SliceReport]:
        return [s for s in self.slices if s.fits]

    def to_json(self) -> str:
        """What `preflight.json` holds."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def text(self, explain: bool = False, width: int = 110) -> str:
        """The report for people, without colours."""
        stream = io.StringIO()
        self.print(Console(file=stream, width=width), explain)
        return stream.getvalue()

    def print(self, console: Console, explain: bool = False) -> None:
        """Prints the table of the slices, and for each what there is to say."""
        details = [line for item in self.slices for line in _details(item, explain)]
        for part in [_title(self), _table(self), *details, *_evidence(self)]:
            # Shapes have brackets, which are no mark-up; a pipe gets whole lines.
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def fill(report: SliceReport, cost: costs.Cost, target: Slice, run, global_batch_size: int) -> None:
    """Puts a priced step into the report of its slice.

    Args:
        report: has the names and the verdict already.
        cost: the step, counted and priced.
        target: the slice.
        run: a `tftpu.preflight.examine.Run`.
        global_batch_size: examples a step.
    """
    report.hbm = {**dataclasses.asdict(cost.memory)}
    report.hbm_bytes = cost.memory.total
    report.largest_tensors = cost.large
    report.step_ms = cost.seconds * 1e3
    report.step_ms_low, report.step_ms_high = cost.seconds_low * 1e3, cost.seconds_high * 1e3
    report.roofline_ms = cost.roofline_seconds * 1e3
    report.collective_ms = cost.collective_seconds * 1e3
    report.examples_per_second = global_batch_size / cost.seconds
    report.flops, report.model_flops = cost.flops, cost.model_flops
    report.mfu = cost.model_flops / (cost.seconds * target.flops_per_s)
    report.bytes_accessed = cost.bytes_accessed
    report.arithmetic_intensity = costs.arithmetic_intensity(cost)
    balance = target.flops_per_s / target.bytes_per_s
    report.bound = "compute" if report.arithmetic_intensity > balance else "memory"
    report.estimated_cycles = cost.cycles
    report.by_layer = _spent(cost.by("layer"), cost.seconds)
    report.by_kind = _spent(cost.by("kind"), cost.seconds)
    top = sorted(cost.instructions, key=lambda p: -p.seconds)[:10]
    report.top_instructions = [
        Spent(p.name, p.seconds * 1e3, p.seconds / cost.seconds, p.cycles, p.layer) for p in top
    ]
    _price_run(report, cost.seconds, target, run, global_batch_size)


def _spent(rows: list[tuple], total: float) -> list[Spent]:
    return [Spent(name, seconds * 1e3, seconds / total, cycles) for name, seconds, cycles in rows]


def _price_run(
    report: SliceReport, seconds: float, target: Slice, run, global_batch_size: int
) -> None:
    generation = target.generation
    usd_hour = run.prices.get(generation.name, generation.usd_hour) * target.chips
    usd_step = usd_hour * seconds / 3600
    report.usd_per_1000_steps = 1000 * usd_step
    if run.examples_per_epoch:
        report.usd_per_epoch = usd_step * run.examples_per_epoch / global_batch_size
    if run.steps:
        report.hours_per_run = run.steps * seconds / 3600
        report.usd_per_run = run.steps * usd_step
        if generation.watts:
            report.kwh_per_run = report.hours_per_run * generation.watts * target.chips / 1000


# For people


def _title(report: Report) -> str:
    run = f", {report.steps:,} steps" if report.steps else ""
    return f"Preflight: global batch {report.global_batch_size}, {report.precision}{run}"


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["slice", "batch/core", "HBM GiB", "step ms", "range", "MFU", "bound", "$/1k steps"]
    columns += ["hours", "$ run"] if report.steps else []
    for column in [*columns, ""]:
        left = column in ("slice", "bound", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    order = [math.inf if s.usd_per_1000_steps is None else s.usd_per_1000_steps
             for s in report.slices]  # fmt: skip
    for _, item in sorted(zip(order, report.slices), key=lambda pair: pair[0]):
        table.add_row(*_row(item, report))
    return table


def _row(item: SliceReport, report: Report) -> list[str]:
    hbm = f"{_gib(item.hbm_bytes)} of {_gib(item.hbm_limit_bytes)}" if item.hbm_bytes else "-"
    start = [item.slice, str(item.per_core_batch or "-"), hbm]
    if not item.fits:
        verdict = "does not fit" if item.compiles else "does not compile"
        return [*start, *["-"] * (7 if report.steps else 5), verdict]
    row = [
        *start,
        f"{item.step_ms:.3g}",
        f"{item.step_ms_low:.3g}-{item.step_ms_high:.3g}",
        f"{item.mfu:.1%}",
        item.bound,
        f"{item.usd_per_1000_steps:.3g}",
    ]
    if report.steps:
        row += [f"{item.hours_per_run:.3g}", f"{item.usd_per_run:.3g}"]
    marks = [
        mark
        for mark, best in (("cheapest", report.cheapest), ("fastest", report.fastest))
        if best is item and len(report.slices) > 1
    ]
    return [*row, ", ".join(marks)]


def _details(item: SliceReport, explain: bool) -> list:
    lines: list = ["", f"{item.slice}"]
    if not item.compiles:
        return [*lines, f"  {item.error}"]
    if not item.fits:
        return [*lines, *_misfit(item)]
    share = item.hbm_bytes / item.hbm_limit_bytes
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in item.hbm.items())
    lines += [
        f"  memory: {_gib(item.hbm_bytes)} GiB, {share:.0%} of what a program may use ({parts})",
        "  largest: " + "; ".join(_tensor(t) for t in item.largest_tensors[:3]),
        f"  work: {item.flops / 1e9:,.1f} GFLOP ({item.model_flops / 1e9:,.1f} the model's), "
        f"{item.bytes_accessed / 1e9:,.3g} GB of HBM, {item.arithmetic_intensity:.3g} FLOP/B: "
        f"{item.bound}-bound",
        f"  time: {item.step_ms:.3g} ms ({item.examples_per_second:,.0f} examples/s on the slice);"
        f" roofline {item.roofline_ms:.3g} ms; collectives {item.collective_ms:.3g} ms;"
        f" the compiler estimates {item.estimated_cycles / 1e6:,.2f} M cycles",
        *_money(item),
    ]
    lines += [f"  ! {text}" for text in item.lints[: None if explain else 4]]
    if len(item.lints) > 4 and not explain:
        lines.append(f"  ! {len(item.lints) - 4} more with --explain")
    return [*lines, *(_explanation(item) if explain else [])]


def _money(item: SliceReport) -> list[str]:
    parts = []
    if item.usd_per_epoch is not None:
        parts.append(f"${item.usd_per_epoch:.3g} an epoch")
    if item.usd_per_run is not None:
        parts.append(f"${item.usd_per_run:.3g} and {item.hours_per_run:.3g} h the run")
    if item.kwh_per_run is not None:
        parts.append(f"{item.kwh_per_run:.3g} kWh")
    return ["  cost: " + ", ".join(parts)] if parts else []


def _misfit(item: SliceReport) -> list[str]:
    over = item.hbm_bytes - item.hbm_limit_bytes
    lines = [
        f"  Does not fit: it needs {_gib(item.hbm_bytes)} GiB and there are "
        f"{_gib(item.hbm_limit_bytes)}, {_gib(over)} too few.",
        f"  The compiler says: {item.error.splitlines()[0][:240]}",
    ]
    if item.largest_per_core_batch:
        lines.append(
            f"  The largest batch that fits is {item.largest_per_core_batch} a core, a global "
            f"batch of {item.largest_per_core_batch * item.replicas}; "
            f"{item.smallest_failing_batch} a core does not."
        )
    elif item.largest_per_core_batch == 0:
        lines.append("  No batch fits: the weights and the optimizer's state alone are too large.")
    return [*lines, *(f"  {text}" for text in item.advice)]


def _explanation(item: SliceReport) -> list:
    tables = []
    for title, rows in (
        ("by kind", item.by_kind),
        ("by layer", item.by_layer[:15]),
        ("top instructions", item.top_instructions),
    ):
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for column in (f"  {title}", "ms", "of step", "M cycles", ""):
            left = column in (f"  {title}", "")
            table.add_column(column, justify="left" if left else "right", no_wrap=True)
        for row in rows:
            table.add_row(
                f"  {row.name}",
                f"{row.ms:.3g}",
                f"{row.step_share:.1%}",
                f"{row.cycles / 1e6:.3g}",
                row.layer,
            )
        tables += ["", table]
    return tables


def _tensor(tensor: costs.LargeTensor) -> str:
    padding = f", {tensor.padding / tensor.bytes:.0%} padding" if tensor.padding else ""
    return f"{tensor.shape} {tensor.bytes / 2**20:.4g} MiB{padding} of {tensor.layer}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


def _evidence(report: Report) -> list[str]:
    """What the figures rest on."""
    lines = [
        "",
        "Compiled with the TPU compiler, not run. Time: the compiler's cycles, calibrated on "
        "published runs of v2, v3 and v4 (tftpu/preflight/cost.py says how).",
        f"Prices: {PRICE_SOURCE}; --price changes them.",
    ]
    if any(s.kwh_per_run is not None for s in report.slices):
        lines.append(f"Energy: {POWER_SOURCE}.")
    return lines
