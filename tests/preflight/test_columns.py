"""Tables in a terminal: which columns a narrow one shows, and how wide they are."""

import io

from rich.console import Console

from tftpu.preflight.columns import build_table

ROWS = [
    {"slice": "v6e-8", "changes": "remat=products", "memory": "26.7 GiB of 31.2 GiB"},
    {"slice": "v5p-8", "changes": "remat=none microbatches=2", "memory": "9 GiB of 95.7 GiB"},
]


def print_table(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(build_table(ROWS, width, ("memory",), ("slice", "changes"), ("changes",)))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_column_that_wraps_is_as_wide_as_its_longest_line():
    assert print_table(60) == [
        "slice  changes                                  memory",
        "v6e-8  remat=products             26.7 GiB of 31.2 GiB",
        "v5p-8  remat=none microbatches=2     9 GiB of 95.7 GiB",
    ]
    assert print_table(50) == [
        "slice  changes                       memory",
        "v6e-8  remat=products  26.7 GiB of 31.2 GiB",
        "v5p-8  remat=none         9 GiB of 95.7 GiB",
        "       microbatches=2",
    ]


def test_a_narrow_terminal_leaves_out_what_is_optional():
    assert print_table(40)[1:] == [
        "v6e-8  remat=products",
        "v5p-8  remat=none microbatches=2",
    ]
