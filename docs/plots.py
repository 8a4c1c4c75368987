"""Draws the figures of the documentation's tables: a plot for each claim of `benchmarks.md`.

    python docs/plots.py

Every number is read from a page, which names the command and the date that it comes from.
"""

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
OURS, OTHERS, LINE = "#0b7285", "#adb5bd", "#495057"  # differ in shades of grey, too
# Without a date and random ids, so that the same tables give the same files.
plt.rcParams.update({"svg.hashsalt": "tftpu", "font.size": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "axes.titlelocation": "left"})


def read_table(page: str, head: str) -> list[list[str]]:
    """Returns the rows of the table of a page whose head begins with a text."""
    text = (DOCS / page).read_text()
    lines = text[text.index(f"\n| {head}") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def read_number(text: str) -> float:
    """Returns the first number of a cell, such as 21640.0 of "21,640 ms"."""
    found = re.search(r"[-+]?[\d.]+(e-?\d+)?", text.replace(",", ""))
    if found is None:
        raise ValueError(f"{text!r} holds no number.")
    return float(found[0])


def read_seconds(text: str) -> float:
    """Returns the seconds of a cell such as "22.7 us", "216 ms" or "12.2 s"."""
    return read_number(text) * {"us": 1e-6, "ms": 1e-3}.get(text.split()[-1], 1)


def same_numbers(axes: Axes) -> None:
    """Draws how far the weights of each script are from Keras's, with one and with four devices."""
    rows = read_table("compatibility.md", "script | what")
    for column, name, colour in ((3, "one device", OTHERS), (4, "four devices", OURS)):
        found = sorted(max(read_number(row[column]), 1e-9) for row in rows if row[column])
        axes.plot(range(1, len(found) + 1), found, "o", markersize=4, color=colour, label=name)
    axes.axhline(1e-5, color=LINE, linewidth=1, linestyle="--")
    axes.text(1, 1.4e-5, "rounding", color=LINE)
    axes.set(yscale="log", xlabel="scripts, sorted", ylabel="largest relative difference")
    axes.set_yticks([1e-9, 1e-7, 1e-5, 1e-3], ["0", "1e-7", "1e-5", "1e-3"])
    axes.legend(frameon=False)


def predicted(axes: Axes) -> None:
    """Draws predicted step times over published ones."""
    rows = read_table("guides/preflight.md", "run | predicted")[::-1]
    ratios = [read_seconds(row[1]) / read_seconds(row[2]) for row in rows]
    axes.axvspan(0.8, 1.2, color="#e9ecef")
    axes.axvline(1, color=LINE, linewidth=1)
    axes.plot(ratios, range(len(rows)), "o", color=OURS)
    axes.set(xlim=(0.5, 1.5), xlabel="predicted / published time of a step")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])


def cycles(axes: Axes) -> None:
    """Draws the cycles of train steps relative to other implementations."""
    rows, names, before = read_table("speed.md", "step | compared"), [], ""
    for row in rows:
        step = row[0].split(",")[0]
        plain = before if step.startswith("the same") else step
        flash = " with flash attention" if "flash" in row[0] else ""
        names.append(f"{plain}{flash}, {row[1]}")
        before = plain
    _draw_pairs(
        axes,
        names,
        [read_number(row[2]) for row in rows],
        [read_number(row[3]) for row in rows],
        ("v5e", "v3"),
    )
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set(xlabel="cycles of a step, the other implementation = 1")


def sharded(axes: Axes) -> None:
    """Draws cycles and memory of a sharded Llama 3.2 1B beside KerasHub's."""
    rows = read_table("speed.md", "| mesh | memory")
    names = [f"{row[0]}, {row[1].strip('`')}" for row in rows]
    memory, work = ([read_number(row[i]) for row in rows] for i in (2, 3))
    _draw_pairs(
        axes,
        names,
        [value / memory[-1] for value in memory],
        [value / work[-1] for value in work],
        ("memory", "cycles"),
    )
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set(xlabel="a chip's share, tftpu = 1")


def trainer(axes: Axes) -> None:
    """Draws the trainer's time of a step over a bare loop's and over Keras's."""
    rows = read_table("speed.md", "config | trainer")
    others = ("the bare step", "Keras's fit", "Keras's fit without XLA")
    names = [f"{row[0].strip('`')} over {other}" for row in rows for other in others]
    values = [read_number(row[2 + column]) for row in rows for column in range(3)]
    axes.barh(range(len(values)), values[::-1], height=0.6, color=OURS)
    axes.set_yticks(range(len(values)), names[::-1])
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set(xlabel="time of a step, the other = 1")


def scaling(axes: Axes) -> None:
    """Draws the step time of Llama 3.1 8B on more and more chips, with as much work for each."""
    text = (DOCS / "speed.md").read_text()
    chips, step, exposed = (
        list(map(read_number, re.search(rf"^\| {head} \|(.+)\|$", text, re.M)[1].split("|")))
        for head in ("v5e chips", "predicted s a step", "exchange that nothing hides, s")
    )
    places = range(len(chips))
    rest = [whole - part for whole, part in zip(step, exposed)]
    axes.bar(places, rest, width=0.6, color=OURS, label="computation")
    axes.bar(places, exposed, width=0.6, bottom=rest, color=OTHERS, label="exchange not hidden")
    axes.set_xticks(places, [f"{count:.0f}" for count in chips])
    axes.set(xlabel="chips of v5e, 4,096 tokens each", ylabel="seconds of a step")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def _draw_pairs(
    axes: Axes, names: list[str], first: list[float], second: list[float], labels: tuple[str, str]
) -> None:
    """Draws two horizontal bars for each name, the first name at the top."""
    for values, shift, colour, label in (
        (first, 0.19, OURS, labels[0]),
        (second, -0.19, OTHERS, labels[1]),
    ):
        places = [len(names) - 1 - place + shift for place in range(len(names))]
        bars = axes.barh(places, values, height=0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


PLOTS: dict[str, tuple[Callable[[Axes], None], float]] = {  # with the height in inches
    "same_numbers": (same_numbers, 3.6),
    "predicted": (predicted, 10.5),
    "cycles": (cycles, 4.2),
    "sharded": (sharded, 2.8),
    "trainer": (trainer, 2.8),
    "scaling": (scaling, 3.4),
}

if __name__ == "__main__":
    for name, (draw, height) in PLOTS.items():
        figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
        draw(axes)
        path = DOCS / "images" / "benchmarks" / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)
        print(path)
