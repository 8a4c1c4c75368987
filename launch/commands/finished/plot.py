"""Draws the curves of one or more runs into one picture.

tftpu plot runs/digits_resnet --output=curves.png
"""

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tftpu import installation
from tftpu.amounts import format_metric
from tftpu.errors import UserError, counted, did_you_mean
from tftpu.launch.correction import expand_folders, suggest_folder
from tftpu.launch.run import result
from tftpu.launch.settings.options import flag, required
from tftpu.observe.writers import THROUGHPUT
from tftpu.runtime.slow import reporting_if_slow
from tftpu.storage import files, lines

# Metrics that are drawn first, in this order. The others follow in the order of their names.
_FIRST = ("loss", "accuracy", "learning_rate", THROUGHPUT)
_COLUMNS = 3
_LEGEND_COLUMNS = 4
_MARGIN = 20.0  # pixels of space beside and below the legend
_POINTS = 30  # curves with fewer points are drawn with markers
_SPLITS = ("train", "eval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Runs to draw, and the picture to write."""

    workdirs: tuple[str, ...] = required(
        "RUN",
        "folder of a run, local or gs://, or of several runs",
        word=True,
        aliases=("workdir",),
    )
    output: str = flag("curves.png", "picture to write: .png, .svg or .pdf", metavar="FILE")
    metrics: str = flag(
        "", "metrics to draw, such as loss,accuracy", metavar="NAME,...", shown="all"
    )
    log: bool = flag(False, "draw logarithmic axes where all values are positive")


class Curve(NamedTuple):
    """The values of one metric over the steps."""

    steps: list[int]
    values: list[float]


@dataclasses.dataclass
class RunCurves:
    """The curves of a run, by metric and split, and its best checkpoint."""

    curves: dict[tuple[str, str], Curve] = dataclasses.field(default_factory=dict)
    best: result.BestCheckpoint | None = None


def run(options: Options) -> None:
    """Draws each metric of `metrics.jsonl` over the steps, and prints the picture's path.

    Raises:
        UserError: there is nothing to draw, or the picture cannot be written.
    """
    workdirs, output = expand_folders(options.workdirs), options.output
    metrics, log = options.metrics, options.log
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"tftpu plot needs matplotlib: run `{installation.command('plot')}`.")
    if not output.endswith((".png", ".svg", ".pdf")):
        raise UserError(f"--output={output}: the file must end in .png, .svg or .pdf.")
    runs: dict[str, RunCurves] = {}
    for name, workdir in zip(choose_labels(workdirs), workdirs):
        try:
            runs[name] = read_curves(workdir)
        except UserError as error:
            if workdir in options.workdirs or (workdir == workdirs[-1] and not runs):
                raise
            print(f"Left out: {error}", file=sys.stderr)
    with reporting_if_slow(f"Drawing {counted(len(runs), 'run')}"):
        draw(runs, select_metrics(runs, metrics), output, log)
    print(f"{counted(len(runs), 'run')} in {output}")


def choose_labels(workdirs: Sequence[str]) -> list[str]:
    """Returns the runs' labels: folder names, or paths if names are equal; rejects equal paths."""
    short = [os.path.basename(os.path.normpath(workdir)) for workdir in workdirs]
    if len(set(short)) == len(short):
        return short
    if len(set(workdirs)) < len(workdirs):
        raise UserError("The same workdir is given twice.")
    return list(workdirs)


def read_curves(workdir: str) -> RunCurves:
    """Reads the curves of a run; values that are not finite are left out.

    Raises:
        UserError: the run has no metrics.
    """
    found = RunCurves(best=result.read_best(workdir))
    for step, split, numbers in lines.read(files.join(workdir, "metrics.jsonl")):
        for name, value in numbers.items():
            if math.isfinite(value):
                curve = found.curves.setdefault((name, split), Curve([], []))
                curve.steps.append(step)
                curve.values.append(value)
    if not found.curves:
        raise UserError(
            f"There are no metrics in {workdir!r}: has a run been started there?"
            f"{suggest_folder(workdir)}"
        )
    return found


def select_metrics(runs: Mapping[str, RunCurves], metrics: str) -> list[str]:
    """Returns the metrics to draw, in order: those named in `metrics`, or all if it names none.

    Raises:
        UserError: `metrics` names a metric that no run has.
    """
    known = {name for found in runs.values() for name, _ in found.curves}
    wanted = [name.strip() for name in metrics.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"--metrics: no run has the metric {name!r}.{hint}")
    if wanted:
        return list(dict.fromkeys(wanted))
    first = [name for name in _FIRST if name in known]
    return first + sorted(known - set(first))


def draw(runs: Mapping[str, RunCurves], metrics: Sequence[str], output: str, log: bool) -> None:
    """Writes the picture: a panel for each metric, a colour for each run."""
    import matplotlib

    matplotlib.use("Agg")  # this backend needs no screen
    from matplotlib import pyplot

    rows = _split_rows(len(metrics))
    width, height = 5.2 * max(rows), 3.6 * len(rows)
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    colours = pyplot.get_cmap("tab10" if len(runs) <= 10 else "tab20")
    span = math.lcm(*rows)
    grid = figure.add_gridspec(len(rows), span)
    left = list(metrics)
    handles: dict[str, Any] = {}
    for row, count in enumerate(rows):
        for column in range(count):
            each = span // count
            axis = figure.add_subplot(grid[row, column * each : (column + 1) * each])
            name = left.pop(0)
            for index, (label, found) in enumerate(runs.items()):
                later = list(runs.values())[index + 1 :]
                _draw_run(axis, name, label, found, colours(index % colours.N), later)
            _set_axes(axis, name, log)
            if any((name, "eval") in found.curves for found in runs.values()):
                axis.set_ylabel("train: mean since the last point")
            handles |= {text: handle for handle, text in zip(*axis.get_legend_handles_labels())}
    _add_legend(figure, handles)
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise UserError(f"--output={output} cannot be written ({error.strerror}).") from error
    finally:
        pyplot.close(figure)


def _add_legend(figure: Any, handles: Mapping[str, Any]) -> None:
    """Adds one legend for all panels below them; the picture grows to fit it."""
    columns = min(_LEGEND_COLUMNS, len(handles))
    while True:
        legend = figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns
        )
        size = legend.get_window_extent()
        if columns == 1 or size.width < figure.bbox.width - _MARGIN:
            break
        legend.remove()
        columns -= 1
    width, height = figure.get_size_inches()
    wide, high = ((length + _MARGIN) / figure.dpi for length in (size.width, size.height))
    figure.set_size_inches(max(width, wide), height + high)


def _draw_run(
    axis: Any, name: str, label: str, found: RunCurves, colour: Any, later: Sequence[RunCurves]
) -> None:
    """Draws a run: training thin and pale, evaluation dashed, and a star at the best checkpoint.

    A curve is widened for each run in `later` with an equal curve, so that all stay visible.
    """
    for split in _SPLITS:
        curve = found.curves.get((name, split))
        if curve is None:
            continue
        few = len(curve.steps) < _POINTS
        wider = 3.0 * sum(other.curves.get((name, split)) == curve for other in later)
        style: dict[str, Any] = (
            {
                "linestyle": "-",
                "linewidth": 1.2 + wider,
                "alpha": 0.55,
                "marker": "." if few else None,
            }
            if split == "train"
            else {"linestyle": "--", "linewidth": 1.8 + wider, "marker": "o" if few else None}
        )
        axis.plot(
            *curve, color=colour, markersize=6 + 2 * wider, label=f"{label} ({split})", **style
        )
    best = found.best
    wider = 6.0 * sum(other.best == best for other in later)
    if best and best.metric == name and (name, "eval") in found.curves:
        axis.plot(
            [best.step],
            [best.value],
            linestyle="",
            marker="*",
            markersize=15 + wider,
            markerfacecolor=colour,
            markeredgecolor="black",
            zorder=5,
            label=f"{label} (best: {format_metric(best.value)} at step {best.step})",
        )


def _set_axes(axis: Any, name: str, log: bool) -> None:
    """Sets title, label, grid and scale of a panel; logarithmic only if all values are positive."""
    axis.set_title(name)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    if name == THROUGHPUT:
        axis.set_ylim(bottom=0)
    elif log and all(min(line.get_ydata()) > 0 for line in axis.get_lines()):
        axis.set_yscale("log")


def _split_rows(count: int) -> list[int]:
    """Returns the number of panels in each row, as equal as possible."""
    rows = -(-count // _COLUMNS)
    return [count // rows + (row < count % rows) for row in range(rows)]
