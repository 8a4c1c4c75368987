"""Terminal output of preflight: the table of slices, and the details of each."""

from collections.abc import Sequence

from rich.table import Table

from tftpu.amounts import (
    format_duration,
    format_duration_range,
    format_energy,
    format_number,
    format_price,
    format_quantity,
    format_size,
)
from tftpu.errors import counted
from tftpu.preflight.columns import build_table
from tftpu.preflight.pricing.cost import LargeTensor
from tftpu.preflight.slice_report import SliceReport, Spent, describe_verdict
from tftpu.tpu.compiler_options import as_text
from tftpu.tpu.slices import parse_slice

MAX_LINTS = 4  # most findings that are shown without `explain`
MAX_LAYERS = 15

# Columns that a narrow terminal leaves out, in this order. The details repeat their figures.
_OPTIONAL = ("bound", "range", "batch/core", "MFU", "cost/1k steps")
_TEXT = ("slice", "bound", "")  # columns aligned to the left


def build_overview(rows: Sequence[tuple[SliceReport, str]], with_run: bool, width: int) -> Table:
    """Returns the table of slices.

    Args:
        rows: the slices in the order of the table, each with its remark.
        with_run: whether to show the time and cost of the run.
        width: width of a line, in characters; if necessary, columns are left out.
    """
    cells = [format_cells(item, remark, with_run) for item, remark in rows]
    return build_table(cells, width, _OPTIONAL, _TEXT)


def build_details(item: SliceReport, explain: bool) -> list[str | Table]:
    """Returns the lines and tables that describe one slice.

    Args:
        item: the slice.
        explain: whether to include the time by layer, kind and instruction, and all findings.
    """
    lines: list[str | Table] = ["", item.slice]
    if not item.compiles:
        return [*lines, f"  {item.error}"]
    if not item.fits:
        return [*lines, *_describe_misfit(item)]
    lines += [f"  mesh: {item.mesh}"] if item.mesh else []
    lines += [
        *_describe_memory(item),
        *(_describe_unpriced(item) if item.step_ms is None else _describe_figures(item)),
    ]
    lines += [f"  ! {text}" for text in item.lints[: None if explain else MAX_LINTS]]
    if len(item.lints) > MAX_LINTS and not explain:
        lines.append(f"  ! {len(item.lints) - MAX_LINTS} more findings")
    return [*lines, *(_build_explanation(item) if explain and item.step_ms is not None else [])]


def format_cells(item: SliceReport, remark: str, with_run: bool) -> dict[str, str]:
    """Returns one row of the overview, by column."""
    hbm = f"{format_size(item.hbm_bytes)} of {format_size(item.hbm_limit_bytes)}"
    cells = {
        "slice": item.slice,
        "batch/core": f"{item.per_core_batch:,}" if item.per_core_batch else "-",
        "HBM": hbm if item.hbm_bytes else "-",
        "step": _format_time(item.step_ms),
        "range": _format_range(item),
        "MFU": "-" if item.mfu is None else f"{item.mfu:.1%}",
        "bound": item.bound or "-",
        "cost/1k steps": _price(item.usd_per_1000_steps),
    }
    if with_run:
        hours = item.hours_per_run
        cells["time/run"] = "-" if hours is None else format_duration(3600 * hours)
        cells["cost/run"] = _price(item.usd_per_run)
    if not item.fits:
        remark = describe_verdict(item)
    return {**cells, "": remark}


def _describe_memory(item: SliceReport) -> list[str]:
    """Returns the lines about the memory of a step that fits."""
    share = item.hbm_bytes / item.hbm_limit_bytes
    parts = ", ".join(f"{name} {format_size(count)}" for name, count in item.hbm.items())
    examples = counted(item.per_core_batch, "example")
    lines = [
        f"  memory: {format_size(item.hbm_bytes)} with {examples} per core, "
        f"{share:.1%} of the {format_size(item.hbm_limit_bytes)} available ({parts})",
    ]
    if item.host_bytes:
        target = parse_slice(item.slice)
        devices = target.chips_per_host * target.generation.cores
        lines.append(
            f"  memory of the host: {format_size(item.host_bytes)} for each core, "
            f"{format_size(devices * item.host_bytes)} for all cores of a host"
        )
    largest = "; ".join(_format_tensor(t) for t in item.largest_tensors[:3])
    return [*lines, f"  largest: {largest}"] if largest else lines


def _describe_unpriced(item: SliceReport) -> list[str]:
    """Returns the lines about a step that fits, but whose time could not be predicted."""
    return [
        f"  work per device: the model's own {format_quantity(item.model_flops, 'FLOP')}",
        f"  time: not priced; roofline {_format_time(item.roofline_ms)}",
    ]


def _describe_figures(item: SliceReport) -> list[str]:
    """Returns the lines about work, time and prices of a step that fits."""
    intensity = format_number(item.arithmetic_intensity or 0.0)
    return [
        f"  work per device: {format_quantity(item.flops, 'FLOP')} (the model's own: "
        f"{format_quantity(item.model_flops, 'FLOP')}, MFU {item.mfu or 0:.1%}), "
        f"{format_quantity(item.bytes_accessed, 'B')} of HBM traffic, {intensity} FLOP/B: "
        f"{item.bound}-bound",
        f"  time: {_format_time(item.step_ms)} ({_format_range(item)}), "
        f"{_format_rates(item)} on the slice; "
        f"roofline {_format_time(item.roofline_ms)}; collectives "
        f"{_format_time(item.collective_ms)}; "
        f"compiler's estimate {format_quantity(item.estimated_cycles, 'cycles')}",
        *_describe_prices(item),
    ]


def _format_rates(item: SliceReport) -> str:
    examples = f"{format_number(item.examples_per_second or 0.0)} examples/s"
    if item.tokens_per_second is None:
        return examples
    return f"{examples}, {format_number(item.tokens_per_second)} tokens/s"


def _describe_prices(item: SliceReport) -> list[str]:
    parts = [f"{_price(item.usd_per_1000_steps)} per 1,000 steps"]
    if item.usd_per_billion_tokens is not None:
        parts.append(f"{format_price(item.usd_per_billion_tokens)} per 1B tokens")
    if item.usd_per_epoch is not None:
        parts.append(f"{format_price(item.usd_per_epoch)} per epoch")
    if item.usd_per_run is not None and item.hours_per_run is not None:
        time = format_duration(3600 * item.hours_per_run)
        parts.append(f"{format_price(item.usd_per_run)} and {time} for the run")
    if item.kwh_per_run is not None:
        parts.append(format_energy(item.kwh_per_run))
    return ["  cost: " + ", ".join(parts)]


def _describe_misfit(item: SliceReport) -> list[str]:
    """Returns the lines about a step that does not fit in memory."""
    if item.is_arithmetic:
        parts = ", ".join(
            f"{name} {format_size(count)}" for name, count in item.hbm.items() if count
        )
        lines = [
            "  Does not fit: the weights and the optimizer's state alone need "
            f"{format_size(item.hbm_bytes)} on each device, which has "
            f"{format_size(item.hbm_limit_bytes)} ({parts}). This is arithmetic: the step was not "
            "compiled.",
        ]
        return [*lines, *(f"  {text}" for text in item.advice)]
    if item.exceeds_host:
        return [f"  Does not fit: {item.error}"]
    over = item.hbm_bytes - item.hbm_limit_bytes
    # The compiler may report less than the step needs, because it counts only its temporaries.
    more = f", {format_size(over)} more than the" if over > 0 else " or more, beyond the"
    lines = [
        f"  Does not fit: it needs {format_size(item.hbm_bytes)}{more} "
        f"{format_size(item.hbm_limit_bytes)} available.",
    ]
    lines += [f"  The compiler says: {line[:240]}" for line in item.error.splitlines()[:1]]
    if item.largest_per_core_batch:
        lines.append(
            f"  The largest batch that fits is {item.largest_per_core_batch:,} per core, a global "
            f"batch of {item.largest_per_core_batch * item.replicas:,}; "
            f"{item.smallest_failing_batch:,} per core does not fit."
        )
    elif item.smallest_failing_batch:
        lines.append(f"  Not even {item.smallest_failing_batch:,} per core fits.")
    elif item.largest_per_core_batch == 0:
        lines.append("  No batch fits: even the weights and the optimizer's state are too large.")
    return [*lines, *(f"  {text}" for text in item.advice)]


def _build_explanation(item: SliceReport) -> list[str | Table]:
    """Returns the compiler's options, and tables of time by kind, layer and instruction."""
    options = as_text(item.compiler_options).replace(",", " ")
    return [
        *([f"  compiler options: {options}"] if options else []),
        *("", _build_spent_table("by kind", item.by_kind)),
        *("", _build_spent_table("by layer", item.by_layer[:MAX_LAYERS])),
        *("", _build_spent_table("top instructions", item.top_instructions)),
    ]


def _build_spent_table(title: str, rows: Sequence[Spent]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (f"  {title}", "time", "of step", "cycles", ""):
        left = column in (f"  {title}", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cycles = format_quantity(row.cycles, "").strip()
        table.add_row(
            f"  {row.name}", _format_time(row.ms), f"{row.step_share:.1%}", cycles, row.layer
        )
    return table


def _format_tensor(tensor: LargeTensor) -> str:
    padding = f", {tensor.padding / tensor.bytes:.0%} padding" if tensor.padding else ""
    return f"{tensor.shape} of {tensor.layer} ({format_size(tensor.bytes)}{padding})"


def _format_time(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else format_duration(milliseconds / 1e3)


def _format_range(item: SliceReport) -> str:
    if item.step_ms_low is None or item.step_ms_high is None:
        return "-"
    return format_duration_range(item.step_ms_low / 1e3, item.step_ms_high / 1e3)


def _price(usd: float | None) -> str:
    return "-" if usd is None else format_price(usd)
