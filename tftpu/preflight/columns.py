"""Tables for a terminal; a narrow terminal shows only the most important columns."""

import textwrap
from collections.abc import Mapping, Sequence

from rich.table import Table

_GAP = 2  # spaces between columns
_NARROWEST = 10  # minimum width, in characters, of a column whose cells may take several lines


def build_table(
    rows: Sequence[dict[str, str]],
    width: int,
    optional: Sequence[str],
    text: Sequence[str],
    wrapped: Sequence[str] = (),
) -> Table:
    """Returns a table, without some of its optional columns if it would be too wide for a line.

    Args:
        rows: at least one row; the cells of each by column name, with the same columns in all.
        width: width of a line, in characters.
        optional: columns to leave out, in this order, until the table fits.
        text: columns that are aligned to the left.
        wrapped: columns whose cells may take several lines. Cells are wrapped at spaces, or within
            words if the table is too wide even without the optional columns.
    """
    least = {
        name: max(_measure_cell(cell, name in wrapped) for cell in [name, *(r[name] for r in rows)])
        for name in rows[0]
    }
    for name in optional:
        if _measure_line(least) <= width:
            break
        least.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in least:
        justify = "left" if name in text else "right"
        if name in wrapped:
            room = least[name] + max(0, width - _measure_line(least))
            most = max(_measure_lines(cell, room) for cell in [name, *(r[name] for r in rows)])
            table.add_column(
                name,
                justify=justify,
                overflow="fold",
                min_width=_NARROWEST,
                max_width=max(most, _NARROWEST),
            )
        else:  # a cell that still does not fit ends in an ellipsis
            table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[name] for name in least))
    return table


def _measure_line(columns: Mapping[str, int]) -> int:
    return sum(columns.values()) + _GAP * (len(columns) - 1)


def _measure_lines(cell: str, room: int) -> int:
    """Returns the width of the longest line of a cell, wrapped at spaces to `room` characters."""
    return max(map(len, textwrap.wrap(cell, room, break_long_words=False)), default=0)


def _measure_cell(cell: str, wraps: bool) -> int:
    return max(map(len, cell.split()), default=0) if wraps else len(cell)
