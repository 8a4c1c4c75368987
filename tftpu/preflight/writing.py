"""Predicts the time and cost of generating text with a language model on TPU slices."""

import dataclasses
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tftpu.amounts import format_duration, format_duration_range, format_price, format_size
from tftpu.engines.lowered import ModelFn
from tftpu.errors import UserError
from tftpu.preflight import advise, request
from tftpu.preflight.compiling.compiler import (
    TIME_LIMIT,
    Compiled,
    check_machine,
    compile_program,
)
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.pricing.cost import parse_memory_stats, price
from tftpu.tpu.slices import Slice


@dataclasses.dataclass
class WritingReport:
    """The report for one slice whose devices each hold the model and write their own texts.

    Attributes:
        slice: name of the slice.
        rows: number of texts that a device writes at once.
        context: length of the model's context in tokens; times are for the last of these tokens.
        hbm_bytes: bytes of HBM that a device needs; 0 if not known.
        hbm_limit_bytes: bytes of HBM that a program may use.
        error: why a device cannot generate text; "" if it can.
        token_ms: predicted milliseconds to write one token of every row; `token_ms_low` and
            `token_ms_high` are the ends of its range. None if it is not known.
        tokens_per_second: the tokens that all devices write in a second.
        usd_per_million: US dollars for a million tokens.
    """

    slice: str
    rows: int
    context: int
    hbm_limit_bytes: int
    hbm_bytes: int = 0
    error: str = ""
    token_ms: float | None = None
    token_ms_low: float | None = None
    token_ms_high: float | None = None
    tokens_per_second: float | None = None
    usd_per_million: float | None = None


def check_writing(
    model_fn: ModelFn,
    slices: Iterable[str],
    rows: int,
    *,
    precision: str = "mixed_bfloat16",
    prices: dict[str, float] | None = None,
    time_limit: float = TIME_LIMIT,
    verbose: bool = False,
) -> list[WritingReport]:
    """Compiles a language model's generation loop for TPU slices, on a machine without a TPU.

    The loop is that of `tftpu.generate`, for the last tokens of the model's context. Each of these
    tokens costs the same, and no earlier token costs more.

    Args:
        model_fn: function that returns a newly built model that predicts the next token.
        slices: names such as "v5e-1".
        rows: number of texts that a device writes at once.
        precision: dtype policy under which the model is built.
        prices: US dollars per chip-hour by generation; they replace the list prices.
        time_limit: seconds that one compilation may take, as for `PreflightOptions`.
        verbose: whether to show what the compiler writes to standard error.

    Raises:
        UserError: an argument is invalid, the model does not predict the next token, or this
            machine has no TPU compiler.
    """
    request.refuse_model_fn(model_fn)
    targets = request.parse_slices(slices)
    if not isinstance(rows, int) or rows < 1:
        raise UserError(
            f"rows={rows!r}: give the number of texts that a device writes at once, 1 or more."
        )
    check_machine()
    from tftpu.engines.tensorflow.lowering.lower_writing import lower_writing

    with Progress() as progress:
        with progress.show_phase("lowering"):
            writing = lower_writing(model_fn, rows, precision)
        processes = Processes(progress)
        found = []
        for target in targets:
            compiled = compile_program(writing.step, target, {}, time_limit, verbose, processes)
            report = WritingReport(target.name, rows, writing.context, target.generation.hbm_limit)
            report.error = _explain_misfit(compiled)
            if not compiled.error:
                report.hbm_bytes = parse_memory_stats(compiled.memory).total
            if compiled.text:
                cost = price(writing.step, compiled, target)
                times = [cost.seconds, cost.seconds_low, cost.seconds_high]
                _fill(report, [time / writing.tokens for time in times], target, prices)
            found.append(report)
    return found


def _explain_misfit(compiled: Compiled) -> str:
    """Returns why a device cannot run the generation loop; "" if it can."""
    if not compiled.out_of_memory:
        return compiled.error
    needed = advise.parse_memory_error(compiled.error)
    return f"does not fit: needs {format_size(needed[0])}" if needed else "does not fit"


def _fill(
    report: WritingReport, seconds: list[float], target: Slice, prices: dict[str, float] | None
) -> None:
    """Adds times, rates and prices to a report, given [predicted, low, high] seconds per token."""
    generation = target.generation
    report.token_ms, report.token_ms_low, report.token_ms_high = (1e3 * time for time in seconds)
    report.tokens_per_second = target.replicas * report.rows / seconds[0]
    usd_hour = (prices or {}).get(generation.name, generation.usd_hour) * target.chips
    report.usd_per_million = 1e6 * usd_hour / 3600 / report.tokens_per_second


def print_writing(reports: list[WritingReport], console: Console) -> None:
    """Prints a table with the memory, speed and price of generation on each slice."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("slice", "rows/device", "HBM", "token", "range", "tokens/s", "1M tokens", ""):
        justify = "left" if column in ("slice", "") else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for report in reports:
        table.add_row(*_build_cells(report))
    console.print(f"Writing with a context of {reports[0].context:,} tokens, compiled, not run")
    console.print(table)


def _build_cells(report: WritingReport) -> list[str]:
    used = f"{format_size(report.hbm_bytes)} of {format_size(report.hbm_limit_bytes)}"
    cells = [report.slice, f"{report.rows:,}", used if report.hbm_bytes else "-"]
    if report.token_ms is None:
        return [*cells, "-", "-", "-", "-", report.error.splitlines()[0] if report.error else ""]
    low, high = report.token_ms_low or 0.0, report.token_ms_high or 0.0
    return [
        *cells,
        format_duration(report.token_ms / 1e3),
        format_duration_range(low / 1e3, high / 1e3),
        f"{report.tokens_per_second:,.0f}",
        format_price(report.usd_per_million or 0.0),
        "",
    ]
