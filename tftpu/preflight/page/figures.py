"""The plots of a page: memory, bars of time, and roofline, each for a given width."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tftpu.amounts import format_duration, format_number, format_quantity, format_size
from tftpu.preflight.page.svg import (
    CHARACTER,
    build_element,
    build_hover,
    choose_size_ticks,
    choose_ticks,
    clip_name,
    draw_label,
    format_path,
    list_decades,
    plot,
)
from tftpu.preflight.plots import MemoryCurve, RooflinePoint
from tftpu.tpu.slices import Slice

# Sizes in a plot's own units.
NARROW = 440  # narrower plots are drawn for a phone
_ROW, _BAR = 24, 14  # height of a row and of its bar, in a plot of bars
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 30, 30, 42  # margins of a plot with axes
_LABEL = 60  # width of a number below an axis


class Segment(NamedTuple):
    """A part of a bar.

    Attributes:
        value: its length, in a unit that all bars share.
        style: CSS class of its colour.
        hover: what a pointer over it shows.
    """

    value: float
    style: str
    hover: str


class Bar(NamedTuple):
    """A row in a plot of bars.

    Attributes:
        name: the text before the bar, shortened if there is no room.
        segments: the segments of the bar, from left to right.
        shown: the text at the end of the bar.
    """

    name: str
    segments: Sequence[Segment]
    shown: str


def draw_bars(name: str, title: str, rows: Sequence[Bar], width: int) -> str:
    """Returns a plot of horizontal bars, each with a name before it and a text at its end.

    Args:
        name: an identifier, unique on the page.
        title: the title of the plot.
        rows: the bars.
        width: the width of the plot.
    """
    narrow = width < NARROW  # on a phone, names are above the bars
    pitch = _ROW + (16 if narrow else 0)
    figure = CHARACTER * max((len(row.shown) for row in rows), default=0) + 8
    names = (
        0.0
        if narrow
        else min(0.4 * width, CHARACTER * max((len(r.name) for r in rows), default=0) + 16)
    )
    longest = max((sum(s.value for s in row.segments) for row in rows), default=0) or 1
    scale = (width - names - figure) / longest
    parts = []
    for place, row in enumerate(rows):
        y, x = place * pitch + (16 if narrow else 0), names
        room = width if narrow else names - 8
        middle = y + _BAR / 2 + 9
        at = (0, y + 1) if narrow else (names - 8, middle)
        anchor = "start" if narrow else "end"
        shown = clip_name(row.name, room)
        parts.append(
            build_element("g", build_hover(row.name), draw_label(shown, *at, text_anchor=anchor))
        )
        for segment in row.segments:
            length = max(1.0, segment.value * scale) if segment.value else 0.0
            box = {"x": x, "y": y + 5.0, "width": length, "height": _BAR}
            parts.append(
                build_element("rect", build_hover(segment.hover), class_=segment.style, **box)
            )
            x += length
        parts.append(draw_label(row.shown, x + 6, middle, "figure"))
    hover = "; ".join(f"{row.name}: {row.shown}" for row in rows)
    return plot(name, title, hover, width, len(rows) * pitch + 8, *parts)


def draw_memory(name: str, curve: MemoryCurve, code: int, limit: int, width: int) -> str:
    """Returns the plot of the HBM in use over the instructions of a step.

    Args:
        name: an identifier, unique on the page.
        curve: the memory curve.
        code: bytes of the program, part of `curve.base`.
        limit: bytes that a program may use; drawn as a line if the peak is more than half of it.
        width: the width of the plot.
    """
    height = 300
    top = max(curve.bytes)
    near = top > 0.5 * limit
    high = 1.15 * (max(top, limit) if near else top)
    frame = _Frame(width, height)
    places = len(curve.bytes)

    def x(place: float) -> float:
        return frame.left + place / places * frame.width

    def y(size: float) -> float:
        return frame.bottom - size / high * frame.height

    steps = [(x(p + side), y(size)) for p, size in enumerate(curve.bytes) for side in (0, 1)]
    floor, beneath = y(curve.base), y(curve.base - code)
    parts = [_draw_loop(frame, x(lp.first), x(lp.last + 1), lp.times) for lp in curve.loops]
    parts += [
        _draw_band(
            frame, frame.bottom, beneath, "base", f"arguments {format_size(curve.base - code)}"
        ),
        _draw_band(frame, beneath, floor, "code", f"code {format_size(code)}"),
    ]
    area = [(frame.left, floor), *steps, (frame.right, floor)]
    parts.append(build_element("path", d=format_path(area, closed=True), class_="live"))
    parts += [frame.draw_row(y(size), shown) for size, shown in choose_size_ticks(high, 5)]
    count = 3 if width < NARROW else 6
    for tick in choose_ticks(curve.instructions, count):
        parts.append(frame.draw_column(x(tick / curve.instructions * places), f"{tick:,.0f}"))
    parts.append(frame.draw_axis_name("instructions, in program order"))
    if near:
        line = {"x1": frame.left, "x2": frame.right, "y1": y(limit), "y2": y(limit)}
        parts.append(build_element("line", class_="limit", **line))
        parts.append(
            draw_label(f"limit {format_size(limit)}", frame.left + 6, y(limit) - 5, "note")
        )
    parts += _describe_places(frame, curve)
    peak = curve.peak
    parts.append(build_element("circle", cx=x(peak + 0.5), cy=y(top), r=4, class_="peak"))
    shown = f"peak {format_size(top)}"
    parts.append(frame.draw_note(shown, x(peak + 0.5), y(top) - 9))
    description = (
        f"{shown} at instruction {peak * curve.instructions // places:,} of "
        f"{curve.instructions:,}, in {_find_layer_at_peak(curve)}; {format_size(curve.base)} are "
        "in use throughout."
    )
    return plot(
        name, "Memory over the instructions of the step", description, width, height, *parts
    )


def draw_roofline(
    name: str, points: Sequence[RooflinePoint], step_ms: float, target: Slice, width: int
) -> str:
    """Returns the roofline plot of the instructions with matrix products.

    Args:
        name: an identifier, unique on the page.
        points: the instructions.
        step_ms: time of the step.
        target: the slice.
        width: the width of the plot.
    """
    height = 320
    # The right margin is a column for instructions that move no bytes.
    frame = _Frame(width, height, right=58)
    ridge = target.flops_per_s / target.bytes_per_s
    moving = [p.flops / p.hbm_bytes for p in points if p.hbm_bytes]
    rates = [p.flops / p.ms * 1e3 for p in points]
    low_x, high_x = min([ridge / 30, *moving]) / 1.5, max([ridge * 10, *moving]) * 1.5
    low_y = min([target.flops_per_s / 30, *rates]) / 2
    high_y = max([target.flops_per_s, *rates]) * 2

    def x(intensity: float) -> float:
        return frame.left + frame.width * math.log(intensity / low_x) / math.log(high_x / low_x)

    def y(rate: float) -> float:
        return frame.bottom - frame.height * math.log(rate / low_y) / math.log(high_y / low_y)

    start = max(low_x, low_y / target.bytes_per_s)
    roof = [(x(start), y(start * target.bytes_per_s)), (x(ridge), y(target.flops_per_s))]
    roof.append((frame.right, y(target.flops_per_s)))
    parts = [
        frame.draw_row(y(rate), format_quantity(rate, "FLOP/s"))
        for rate in list_decades(low_y, high_y)
    ]
    tens = list(list_decades(low_x, high_x))
    every = math.ceil(len(tens) * _LABEL / frame.width)
    parts += [frame.draw_column(x(value), format_number(value)) for value in tens[::every]]
    parts.append(frame.draw_axis_name("FLOP per byte of HBM traffic"))
    parts.append(build_element("path", d=format_path(roof), class_="roof"))
    peak = f"peak {format_quantity(target.flops_per_s, 'FLOP/s')}"
    parts.append(draw_label(peak, frame.right, roof[1][1] - 7, "note", text_anchor="end"))
    parts.append(_draw_slanted(f"{format_quantity(target.bytes_per_s, 'B/s')}", roof[0], roof[1]))
    aside = frame.right + 30
    if len(moving) < len(points):
        parts.append(draw_label("no HBM", aside, frame.bottom + 16, "tick", text_anchor="middle"))
    for point, rate in zip(points, rates):
        at = x(point.flops / point.hbm_bytes) if point.hbm_bytes else aside
        size = 3 + 14 * math.sqrt(point.ms / step_ms)
        hover = build_hover(_describe_point(point, rate, step_ms))
        parts.append(build_element("circle", hover, cx=at, cy=y(rate), r=size, class_="point"))
    longest = "; ".join(f"{p.layer}: {format_quantity(r, 'FLOP/s')}" for p, r in zip(points, rates))
    description = f"{peak}. The longest instructions: {longest[:600]}"
    return plot(name, "Roofline of the instructions", description, width, height, *parts)


class _Frame:
    """The area of a plot with axes.

    Args:
        width, height: the size of the whole plot, margins included.
        right: the width of the right margin.
    """

    def __init__(self, width: int, height: int, right: int = _RIGHT):
        self.left, self.right = _LEFT, width - right
        self.top, self.bottom = _TOP, height - _BOTTOM

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def draw_row(self, y: float, shown: str) -> str:
        """Returns a horizontal line of the grid with its label."""
        line = build_element("line", x1=self.left, x2=self.right, y1=y, y2=y, class_="grid")
        return line + draw_label(shown, self.left - 7, y + 4, "tick", text_anchor="end")

    def draw_column(self, x: float, shown: str) -> str:
        """Returns a tick of the horizontal axis with its label."""
        box = {"x1": x, "x2": x, "y1": self.bottom, "y2": self.bottom + 4}
        tick = build_element("line", class_="axis", **box)
        return tick + draw_label(shown, x, self.bottom + 17, "tick", text_anchor="middle")

    def draw_axis_name(self, shown: str) -> str:
        """Returns the name of the horizontal axis."""
        middle = (self.left + self.right) / 2
        return draw_label(shown, middle, self.bottom + 35, "tick", text_anchor="middle")

    def draw_note(self, shown: str, x: float, y: float) -> str:
        """Returns a text centred at a place, moved so that it stays within the frame."""
        half = CHARACTER * len(shown) / 2
        x = min(max(x, self.left + half), self.right - half)
        return draw_label(shown, x, y, "note", text_anchor="middle")


def _describe_places(frame: _Frame, curve: MemoryCurve) -> list[str]:
    """Returns transparent bars over a memory curve, with the texts that a pointer shows."""
    width, count = frame.width / len(curve.bytes), len(curve.bytes)
    found = []
    for place, (size, layer) in enumerate(zip(curve.bytes, curve.layers)):
        at = place * curve.instructions // count
        hover = build_hover(f"instruction {at:,}: {format_size(size)}, {layer}")
        box = {"x": frame.left + place * width, "y": frame.top, "height": frame.height}
        found.append(build_element("rect", hover, class_="sense", width=width, **box))
    return found


def _describe_point(point: RooflinePoint, rate: float, step_ms: float) -> str:
    """Returns the text for a pointer over a point of a roofline."""
    share = f"{format_duration(point.ms / 1e3)}, {point.ms / step_ms:.1%} of the step"
    hover = f"{point.layer} ({point.name}, {point.kind}): {share}; "
    hover += format_quantity(rate, "FLOP/s")
    if not point.hbm_bytes:
        return f"{hover} without HBM traffic"
    return f"{hover} with {format_number(point.flops / point.hbm_bytes)} FLOP/B"


def _draw_band(frame: _Frame, bottom: float, top: float, style: str, hover: str) -> str:
    box = {"x": frame.left, "y": top, "width": frame.width, "height": max(0.0, bottom - top)}
    return build_element("rect", build_hover(hover), class_=style, **box)


def _draw_loop(frame: _Frame, first: float, last: float, times: int | None) -> str:
    """Draws a loop, with the number of its iterations if there is room."""
    shown = "loop" if times is None else f"× {times:,}"  # noqa: RUF001 (a multiplication sign)
    box = {"x": first, "y": frame.top, "width": last - first}
    parts = [
        build_element("rect", class_="loop", height=frame.height, **box),
        build_element("rect", class_="loops", height=3, **box),
    ]
    if last - first > CHARACTER * len(shown) + 4:
        middle = (first + last) / 2
        parts.append(draw_label(shown, middle, frame.top - 6, "tick", text_anchor="middle"))
    return build_element("g", *parts)


def _draw_slanted(shown: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    """Returns a text above the middle of a sloping line, and parallel to it."""
    (x1, y1), (x2, y2) = start, end
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    turn = f"rotate({angle:.1f} {x:.1f} {y:.1f})"
    return draw_label(shown, x, y - 7, "note", text_anchor="middle", transform=turn)


def _find_layer_at_peak(curve: MemoryCurve) -> str:
    return curve.layers[curve.peak] if curve.peak < len(curve.layers) else "the step"
