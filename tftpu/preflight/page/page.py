"""The report as one page of HTML, which needs no network: tables, and plots as inline SVG."""

from collections.abc import Callable, Iterable, Sequence

from tftpu.amounts import (
    format_duration,
    format_number,
    format_price,
    format_quantity,
    format_size,
)
from tftpu.preflight import table
from tftpu.preflight.page import figures
from tftpu.preflight.page.figures import Bar, Segment
from tftpu.preflight.page.style import STYLE
from tftpu.preflight.page.svg import build_element, format_text
from tftpu.preflight.plots import Exchange, MemoryCurve, RooflinePoint
from tftpu.preflight.pricing.cost import LargeTensor
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, Spent
from tftpu.tpu.slices import parse_slice

MAX_BARS = 15
_WORTH = 0.001  # share of the peak; a smaller array is not worth a row
_WIDTHS = (("wider", 860), ("narrow", 360))  # CSS classes, and the widths of their plots
# The page may load nothing, whatever names in the report contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Rows = Iterable[Sequence[str]]


def build_page(report: Report) -> str:
    """Returns a report as a page of HTML.

    Args:
        report: a new report, or one that was read from a file.
    """
    links = [
        build_element("a", format_text(item.slice), href=f"#{_build_identifier(item, place)}")
        for place, item in enumerate(report.slices)
    ]
    body = [
        build_element("h1", format_text(report.title())),
        _build_overview(report),
        build_element("nav", build_element("p", "Slices: ", ", ".join(links)), aria_label="Slices"),
        *(_slice(item, _build_identifier(item, n)) for n, item in enumerate(report.slices)),
        build_element(
            "footer", *(build_element("p", format_text(line)) for line in report.evidence() if line)
        ),
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        build_element("title", format_text(report.title())),
        build_element("style", STYLE),
    ]
    content = build_element("head", *head) + build_element("body", build_element("main", *body))
    return f"<!DOCTYPE html>\n{build_element('html', content, lang='en')}\n"


def _build_identifier(item: SliceReport, place: int) -> str:
    return f"slice-{place + 1}-{item.slice}"


def _build_overview(report: Report) -> str:
    rows = [table.format_cells(s, report.marks(s), bool(report.steps)) for s in report.ranked()]
    if not rows:
        return ""
    names = ["slice", "", *(name for name in rows[0] if name not in ("slice", ""))]
    # The verdict comes before columns that a phone has no room for.
    shown = [name or "verdict" for name in names]
    cells = [[row[name] or "fits" for name in names] for row in rows]
    return _build_table(shown, cells, "All slices", left=("slice", "verdict", "bound"))


def _slice(item: SliceReport, name: str) -> str:
    parts = [build_element("h2", format_text(item.slice))]
    if item.compiles and item.fits:
        parts.append(_build_summary(item))
    else:  # the same lines as in the terminal
        lines = [str(line).strip() for line in table.build_details(item, explain=False)[2:]]
        text = [build_element("p", format_text(line)) for line in lines if line]
        if not item.compiles:
            text.insert(0, build_element("p", build_element("strong", "Does not compile.")))
        parts.append(build_element("div", *text, class_="bad"))
    if item.plots is not None:
        parts.append(_build_memory(item, item.plots.memory, f"{name}-memory"))
    if item.by_layer:
        parts.append(_build_times("Time by layer", item.by_layer, f"{name}-layers"))
        parts.append(_build_times("Time by kind of work", item.by_kind, f"{name}-kinds"))
    if item.plots is not None and item.step_ms:
        parts.append(_build_roofline(item, item.plots.points, item.step_ms, f"{name}-roofline"))
        parts.append(_build_exchange(item.plots.exchanges, item.step_ms, f"{name}-exchange"))
    if item.fits:
        parts.append(_build_findings(item))
    return build_element("section", *parts, id=name)


def _build_summary(item: SliceReport) -> str:
    cells = table.format_cells(item, "", item.usd_per_run is not None)
    share = item.hbm_bytes / item.hbm_limit_bytes if item.hbm_limit_bytes else 0.0
    step = f"{cells['range']}, {cells['bound']}-bound" if item.bound else ""
    cost = "on demand" if item.usd_per_1000_steps is not None else ""
    figures_of = [
        ("Memory", format_size(item.hbm_bytes), f"{share:.1%} of {cells['HBM'].split(' of ')[-1]}"),
        ("Step", cells["step"], step),
        ("MFU", cells["MFU"], f"{format_quantity(item.model_flops, 'FLOP')} of the model"),
        ("Cost of 1,000 steps", cells["cost/1k steps"], cost),
    ]
    if "cost/run" in cells:
        figures_of.append(("Run", cells["cost/run"], cells["time/run"]))
    if item.examples_per_second:
        rate = format_number(item.examples_per_second)
        figures_of.append(("Examples/s", rate, f"{item.per_core_batch:,} per core"))
    if item.tokens_per_second and item.usd_per_billion_tokens is not None:
        price = f"{format_price(item.usd_per_billion_tokens)} per 1B"
        figures_of.append(("Tokens/s", format_number(item.tokens_per_second), price))
    if item.roofline_ms:
        shown = format_duration(item.roofline_ms / 1e3)
        figures_of.append(("Roofline", shown, "no program is faster"))
    if item.mesh:
        figures_of.append(("Mesh", item.mesh, f"{item.replicas:,} devices"))
    cards = [
        build_element(
            "div",
            build_element("dt", format_text(n)),
            build_element("dd", format_text(v), build_element("small", format_text(note))),
        )
        for n, v, note in figures_of
    ]
    return build_element("dl", *cards)


def _build_memory(item: SliceReport, curve: MemoryCurve, name: str) -> str:
    if not curve.instructions or not any(curve.bytes):
        return ""
    code = min(item.hbm.get("code", 0), curve.base)
    drawn = _draw_twice(
        lambda width, id_: figures.draw_memory(id_, curve, code, item.hbm_limit_bytes, width), name
    )
    held = ", ".join(f"{part} {format_size(size)}" for part, size in curve.held.items())
    key = [
        ("base", f"arguments {format_size(curve.base - code)}{f' ({held})' if held else ''}"),
        ("code", f"code {format_size(code)}"),
        ("live", f"temporaries, up to {format_size(max(curve.bytes) - curve.base)}"),
        *([("loops", "bodies of loops, drawn once")] if curve.loops else []),
    ]
    large = [t for t in curve.arrays if t.bytes > _WORTH * max(curve.bytes)]
    rows = [[t.shape, format_size(t.bytes), _format_padding(t), t.layer] for t in large]
    columns = ("array", "size", "padding", "layer")
    return "".join(
        (
            build_element("h3", "Memory over the instructions"),
            drawn,
            _build_legend(key),
            build_element("p", format_text(_describe_agreement(item, curve))),
            build_element("p", "The largest arrays at the peak, apart from arguments:")
            if rows
            else "",
            _build_table(columns, rows, "Arrays at the peak", left=("array", "layer"))
            if rows
            else "",
        )
    )


def _describe_agreement(item: SliceReport, curve: MemoryCurve) -> str:
    """Returns sentences that compare the curve's peak with the bytes that the compiler counts."""
    drawn, counted = max(curve.bytes), item.hbm_bytes
    text = (
        f"The peak of the curve is {format_size(drawn)}; the compiler itself counts "
        f"{format_size(counted)}"
    )
    apart = abs(drawn - counted) / max(counted, 1)
    if apart < 0.005:
        return f"{text}: they agree within 0.5%."
    between = f"{format_size(abs(drawn - counted))} ({apart:.1%})"
    if drawn < counted:
        return f"{text}. The {between} between them is in no array that the program names."
    return f"{text}. They are {between} apart: the curve counts some shared memory twice."


def _format_padding(tensor: LargeTensor) -> str:
    return f"{tensor.padding / tensor.bytes:.0%}" if tensor.padding and tensor.bytes else "-"


def _build_times(title: str, spent: Sequence[Spent], name: str) -> str:
    rows = []
    for part in spent[:MAX_BARS]:
        figure = _format_figure(part.ms, part.step_share)
        rows.append(Bar(part.name, [Segment(part.ms, "time", f"{part.name}: {figure}")], figure))
    rest, text = spent[MAX_BARS:], ""
    if rest:
        figure = _format_figure(sum(s.ms for s in rest), sum(s.step_share for s in rest))
        text = build_element("p", format_text(f"{len(rest)} others: {figure}."))
    cells = [[s.name, format_duration(s.ms / 1e3), f"{s.step_share:.1%}"] for s in spent]
    return "".join(
        (
            build_element("h3", format_text(title)),
            _draw_twice(lambda width, id_: figures.draw_bars(id_, title, rows, width), name),
            text,
            _build_folded_table(
                f"{title}, as a table", ("name", "time", "of step"), cells, left=("name",)
            ),
        )
    )


def _format_figure(milliseconds: float, share: float) -> str:
    return f"{format_duration(milliseconds / 1e3)}, {share:.1%}"


def _build_roofline(
    item: SliceReport, points: Sequence[RooflinePoint], step_ms: float, name: str
) -> str:
    title = build_element("h3", "Roofline")
    points = [p for p in points if p.flops and p.ms]
    if not points:
        return title + build_element("p", "No instruction has matrix products.")
    target = parse_slice(item.slice)
    share = sum(p.ms for p in points) / step_ms
    text = (
        f"The {len(points)} longest instructions with matrix products, {share:.0%} of the step; "
        "larger points take longer. Left of the corner the memory is the limit, right of it "
        "the matrix units are. Rates use predicted times."
    )
    rows = [
        [
            *(p.layer, p.name, format_duration(p.ms / 1e3), format_quantity(p.flops, "FLOP")),
            format_quantity(p.hbm_bytes, "B") if p.hbm_bytes else "none",
        ]
        for p in points
    ]
    columns = ("layer", "instruction", "time", "work", "HBM traffic")
    drawn = _draw_twice(
        lambda width, id_: figures.draw_roofline(id_, points, step_ms, target, width), name
    )
    folded = _build_folded_table(
        "Roofline, as a table", columns, rows, left=("layer", "instruction")
    )
    return title + build_element("p", format_text(text)) + drawn + folded


def _build_exchange(exchanges: Sequence[Exchange], step_ms: float, name: str) -> str:
    title = build_element("h3", "Collectives")
    if not exchanges:
        return title + build_element("p", "The devices exchange nothing.")
    bars, rows = [], []
    for one in exchanges:
        hidden = max(0.0, one.ms - one.waited_ms)
        waited, whole = (format_duration(ms / 1e3) for ms in (one.waited_ms, one.ms))
        sent = format_quantity(one.sent_bytes, "B")
        called = f"{one.opcode} {one.layer}"
        segments = [
            Segment(one.waited_ms, "waited", f"{called}: the step waits {waited}"),
            Segment(hidden, "hidden", f"{called}: {format_duration(hidden / 1e3)} hidden"),
        ]
        bars.append(Bar(called, segments, f"{whole}, {sent}"))
        share = f"{hidden / one.ms:.0%}" if one.ms else "-"
        rows.append([one.opcode, one.layer, f"{one.count:,}", sent, whole, waited, share])
    waited_ms = sum(one.waited_ms for one in exchanges)
    text = f"The step waits {format_duration(waited_ms / 1e3)} for them, {waited_ms / step_ms:.1%}."
    columns = ("collective", "layer", "runs", "sent by a chip", "time", "waited", "hidden")
    return "".join(
        (
            title,
            build_element("p", format_text(text)),
            _draw_twice(
                lambda width, id_: figures.draw_bars(id_, "Collectives", bars, width), name
            ),
            _build_legend([("waited", "the step waits"), ("hidden", "hidden by other work")]),
            _build_folded_table("Collectives, as a table", columns, rows, left=columns[:2]),
        )
    )


def _build_findings(item: SliceReport) -> str:
    found = [*item.lints, *item.advice]
    title = build_element("h3", "Findings and advice")
    if not found:
        return title + build_element("p", "None.")
    return title + build_element("ul", *(build_element("li", format_text(line)) for line in found))


def _draw_twice(draw: Callable[[int, str], str], name: str) -> str:
    """Draws a plot for a screen and for a phone; the style shows one of the two."""
    return "".join(
        build_element("div", draw(width, f"{name}-{kind}"), class_=kind) for kind, width in _WIDTHS
    )


def _build_legend(entries: Iterable[tuple[str, str]]) -> str:
    """Returns a legend, given the CSS class and the text of each colour."""
    items = []
    for style, text in entries:
        box = build_element("rect", width=10, height=10, class_=style)
        swatch = build_element("svg", box, viewBox="0 0 10 10", aria_hidden="true")
        items.append(build_element("li", swatch, format_text(text)))
    return build_element("ul", *items, class_="key")


def _build_folded_table(title: str, columns: Sequence[str], rows: Rows, left: Sequence[str]) -> str:
    return build_element(
        "details",
        build_element("summary", format_text(title)),
        _build_table(columns, rows, title, left),
    )


def _build_table(columns: Sequence[str], rows: Rows, title: str, left: Sequence[str]) -> str:
    """Returns a table that scrolls sideways on a narrow screen.

    Args:
        columns: the names of the columns.
        rows: the cells of each row.
        title: for screen readers.
        left: names of columns aligned to the left.
    """
    styles = ["left" if column in left else "" for column in columns]
    head = [
        build_element("th", format_text(c), class_=s, scope="col") for c, s in zip(columns, styles)
    ]
    lines = [
        build_element(
            "tr", *(build_element("td", format_text(c), class_=s) for c, s in zip(row, styles))
        )
        for row in rows
    ]
    inner = build_element("thead", build_element("tr", *head)) + build_element("tbody", *lines)
    content = build_element("table", inner, aria_label=title)
    return build_element("div", content, class_="wide", tabindex=0, role="region", aria_label=title)
