"""Compares two reports: the figures of each slice, and the layers whose time changed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tftpu.amounts import format_duration, format_number, format_price, format_size
from tftpu.errors import UserError, counted
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, Spent, describe_verdict

MAX_CHANGES = 15  # most rows of a table of layers or of kinds of work
WORTH = 0.001  # least change in time that gets a row, as a share of the earlier step's time
_COLUMNS = ("before", "after", "difference", "")


class Named(NamedTuple):
    """A report and its name, such as its file."""

    name: str
    report: Report


def print_comparison(before: Named, after: Named, console: Console) -> None:
    """Prints the changes from one report to another, for each slice that both have.

    Args:
        before, after: the reports.
        console: where to print.

    Raises:
        UserError: the reports have no slice in common.
    """
    earlier = {item.slice: item for item in before.report.slices}
    both = [item for item in after.report.slices if item.slice in earlier]
    if not both:
        raise UserError(
            f"The reports have no slice in common: {before.name} has {_list_slices(before)}, and "
            f"{after.name} has {_list_slices(after)}. Give --slices=NAMES with slices that both "
            "have."
        )
    lines: list[str | Table] = [
        f"before  {_format_title(before)}",
        f"after   {_format_title(after)}",
    ]
    for item in both:
        lines += ["", *_compare_slice(earlier[item.slice], item, before.report, after.report)]
    for side, other in ((before, after), (after, before)):
        known = {item.slice for item in other.report.slices}
        alone = [item.slice for item in side.report.slices if item.slice not in known]
        if alone:
            lines += ["", f"Only in {side.name}: {', '.join(alone)}."]
    for line in lines:
        # Rich would read brackets in shapes as markup, and break long lines of piped output.
        console.print(line, markup=False, highlight=False, soft_wrap=isinstance(line, str))


def _list_slices(named: Named) -> str:
    return ", ".join(item.slice for item in named.report.slices) or "none"


def _format_title(named: Named) -> str:
    report = named.report
    run = f", {report.steps:,} steps" if report.steps else ""
    return f"{named.name}: global batch {report.global_batch_size:,}, {report.precision}{run}"


def _compare_slice(
    before: SliceReport, after: SliceReport, first: Report, second: Report
) -> list[str | Table]:
    """Returns tables and lines that compare one slice in two reports, `first` and `second`."""
    table = _build_table(after.slice)
    states = [describe_verdict(before), describe_verdict(after)]
    if states != ["fits", "fits"]:
        table.add_row("  verdict", *states, "", "")
    for row in _build_figures(before, after, first, second):
        if row.before is not None or row.after is not None:
            table.add_row(*row.format_cells())
    parts: list[str | Table] = [table]
    for title, old, new in (
        ("by layer", before.by_layer, after.by_layer),
        ("by kind", before.by_kind, after.by_kind),
    ):
        if old and new:
            parts += ["", *_build_changes(title, old, new, before.step_ms or 0.0)]
    return parts


class _Row(NamedTuple):
    """A figure in the first report and in the second."""

    name: str
    before: float | None
    after: float | None
    shown: Callable[[float], str]
    note: str = ""
    # Formats the difference; if None, `shown` does.
    shown_change: Callable[[float], str] | None = None

    def format_cells(self) -> tuple[str, ...]:
        """Returns the row's cells: its name, both figures, their difference and a note."""
        values = ("-" if v is None else self.shown(v) for v in (self.before, self.after))
        return (f"  {self.name}", *values, self._format_difference(), self.note)

    def _format_difference(self) -> str:
        if self.before is None or self.after is None:
            return ""
        change = self.after - self.before
        if not change:
            return "same"
        shown = self.shown_change or self.shown
        text = f"{'+' if change > 0 else '-'}{shown(abs(change))}"
        if not self.before:
            return text
        share = change / self.before
        return f"{text} ({share:+.0%})" if abs(share) >= 1 else f"{text} ({share:+.1%})"


def _build_figures(
    before: SliceReport, after: SliceReport, first: Report, second: Report
) -> list[_Row]:
    rows = [
        _Row("memory", before.hbm_bytes or None, after.hbm_bytes or None, format_size),
        _Row("step", before.step_ms, after.step_ms, _format_time),
        _Row("collectives", before.collective_ms, after.collective_ms, _format_time),
        _Row("MFU", before.mfu, after.mfu, "{:.1%}".format, shown_change=_format_points),
        _Row("examples/s", before.examples_per_second, after.examples_per_second, format_number),
        _Row("cost/1k steps", before.usd_per_1000_steps, after.usd_per_1000_steps, format_price),
        _Row(
            "cost/1B tokens",
            before.usd_per_billion_tokens,
            after.usd_per_billion_tokens,
            format_price,
        ),
        _Row("cost/run", before.usd_per_run, after.usd_per_run, format_price),
    ]
    if first.global_batch_size != second.global_batch_size:  # costs per step do not compare
        old, new = _compute_per_million(before, first), _compute_per_million(after, second)
        rows.insert(-1, _Row("cost/1M examples", old, new, format_price))
    return rows


def _compute_per_million(item: SliceReport, report: Report) -> float | None:
    if item.usd_per_1000_steps is None:
        return None
    return item.usd_per_1000_steps * 1000 / report.global_batch_size


def _build_changes(
    title: str, before: Sequence[Spent], after: Sequence[Spent], step_ms: float
) -> list[str | Table]:
    """Returns a table of the layers or kinds whose time changed most, and a line on all others.

    Without a change that is worth a row, returns only the line.
    """
    old, new = ({spent.name: spent.ms for spent in side} for side in (before, after))
    rows = [_Row(name, old.get(name), new.get(name), _format_time) for name in {**old, **new}]
    rows.sort(key=lambda row: -abs(_format_change(row)))
    shown = [row for row in rows if abs(_format_change(row)) > WORTH * step_ms][:MAX_CHANGES]
    table = _build_table(title)
    for row in shown:
        note = "only before" if row.after is None else "only after" if row.before is None else ""
        table.add_row(*row._replace(note=note).format_cells())
    rest = rows[len(shown) :]
    if not rest:
        return [table]
    change = sum(_format_change(row) for row in rest)
    sign = "+" if change > 0 else "-"
    sentence = (
        f"{sign}{_format_time(abs(change))} in all"
        if abs(change) > WORTH * step_ms
        else "unchanged"
    )
    if not shown:
        return [f"  {title}: {sentence}"]
    return [table, f"  {counted(len(rest), 'other')}: {sentence}"]


def _format_change(row: _Row) -> float:
    return (row.after or 0.0) - (row.before or 0.0)


def _build_table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"  {title}" if title.startswith("by") else title, no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    return table


def _format_time(milliseconds: float) -> str:
    return format_duration(milliseconds / 1e3)


def _format_points(share: float) -> str:
    return f"{100 * share:.1f} points"
