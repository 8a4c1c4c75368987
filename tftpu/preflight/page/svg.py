"""SVG and HTML elements as text, and the scales of a plot."""

import html
import itertools
import math
from collections.abc import Iterator

from tftpu.amounts import SIZES, format_size

CHARACTER = 7.7  # width of a character in a plot, for a wide font


def build_element(tag: str, *content: str, **attributes: object) -> str:
    """Returns an SVG or HTML element as text.

    Args:
        tag: the name of the element.
        content: elements inside, as text; plain text must be escaped with `format_text`.
        attributes: the attributes by name; "_" stands for "-", and a trailing one is removed, as in
            `class_`. Their values are escaped here; floats are rounded.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_format_short(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(content)}</{tag}>"


def format_text(content: object) -> str:
    """Returns text for the inside of an element, escaped."""
    return html.escape(str(content))


def draw_label(content: str, x: float, y: float, class_: str = "", **attributes: object) -> str:
    """Returns a text element of a plot."""
    return build_element("text", format_text(content), x=x, y=y, class_=class_, **attributes)


def build_hover(content: str) -> str:
    """Returns a `title` element: a browser shows its text when the pointer is over its parent."""
    return build_element("title", format_text(content))


def plot(
    name: str, title: str, description: str, width: float, height: float, *content: str
) -> str:
    """Returns a plot that fills the width of its place on the page.

    Args:
        name: an identifier, unique on the page.
        title: the title of the plot, for screen readers.
        description: what the plot shows, for screen readers.
        width, height: the size in the plot's own units.
        content: elements of the plot.
    """
    return build_element(
        "svg",
        build_element("title", format_text(title), id=f"{name}-title"),
        build_element("desc", format_text(description), id=f"{name}-desc"),
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def format_path(points: list[tuple[float, float]], closed: bool = False) -> str:
    """Returns the `d` attribute of a path through points."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) + ("Z" if closed else "")


def clip_name(name: str, width: float) -> str:
    """Returns a name that fits a width; keeps the end of a longer name."""
    room = max(4, int(width / CHARACTER))
    return name if len(name) <= room else "…" + name[1 - room :]


def choose_ticks(high: float, count: int) -> list[float]:
    """Returns round numbers from 0 to `high`, about `count` of them."""
    if high <= 0:
        return [0.0]
    rough = high / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [step * n for n in range(int(high / step * 1.0001) + 1)]


def choose_size_ticks(high: float, count: int) -> Iterator[tuple[float, str]]:
    """Yields (bytes, text) of round sizes from 0 to `high`, all in one binary unit."""
    _, unit = format_size(high).split()
    scale = next(s for s, name in SIZES if name == unit)
    for tick in choose_ticks(high / scale, count):
        yield tick * scale, f"{tick:,.4g} {unit}"


def list_decades(low: float, high: float) -> Iterator[float]:
    """Yields the powers of ten from `low` to `high`."""
    for exponent in itertools.count(math.ceil(math.log10(low) - 1e-9)):
        if 10.0**exponent > high * 1.0001:
            return
        yield 10.0**exponent


def _format_short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
