"""Draws the curves of one or more runs into one picture.

tftpu plot runs/digits_resnet --output=curves.png
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.options import argument, flag
from tftpu.storage import files

# Shown first, in this order; then the others by name.
_FIRST = ("loss", "accuracy", "learning_rate", "examples_per_sec")
_COLUMNS = 3
_POINTS = 30  # fewer are marked one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which runs to draw, and where to."""

    workdirs: tuple[str, ...] = argument("WORKDIR", "folder of a run, local or gs://")
    output: str = flag("curves.png", "picture to write: .png, .svg or .pdf", metavar="FILE")


def run(options: Options) -> None:
    """Draws each metric of `metrics.jsonl` over the steps: training solid, evaluation dashed."""
    workdirs, output = list(options.workdirs), options.output
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("tftpu plot needs matplotlib: run `pip install 'tftpu[plot]'`.")
    if not output.endswith((".png", ".svg", ".pdf")):
        raise UserError(f"--output={output}: write a file that ends in .png, .svg or .pdf.")
    runs = {name: curves(workdir) for name, workdir in zip(names(workdirs), workdirs)}
    draw(runs, output)
    print(f"{len(runs)} run(s) in {output}")


def names(workdirs: list[str]) -> list[str]:
    """What to call each run: its folder's name, or the whole path where that is not unique."""
    short = [os.path.basename(os.path.normpath(workdir)) for workdir in workdirs]
    if len(set(short)) == len(short):
        return short
    if len(set(workdirs)) < len(workdirs):
        raise UserError("The same workdir is given twice.")
    return list(workdirs)


def curves(workdir: str) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """Steps and values of each metric and split of a run.

    Raises:
        UserError: it has none.
    """
    path = files.join(workdir, "metrics.jsonl")
    found: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    if files.exists(path):
        for line in files.read(path).decode().splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                record = json.loads(line)
                step, split = record.pop("step"), record.pop("split")
                record.pop("time", None)
                for name, value in record.items():
                    steps, values = found.setdefault((name, split), ([], []))
                    steps.append(step)
                    values.append(value)
    if not found:
        raise UserError(f"There are no metrics in {workdir!r}: has a run been there?")
    return found


def draw(runs: dict[str, Any], output: str) -> None:
    """Writes the picture: a panel for each metric, a colour for each run."""
    import matplotlib

    matplotlib.use("Agg")  # draws where there is no screen
    from matplotlib import pyplot

    metrics = {name for found in runs.values() for name, _ in found}
    order = [name for name in _FIRST if name in metrics]
    order += sorted(metrics - set(order))
    rows = -(-len(order) // _COLUMNS)
    columns = min(_COLUMNS, len(order))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    colours = pyplot.get_cmap("tab10" if len(runs) <= 10 else "tab20")
    for axis, name in zip(axes.flat, order):
        for index, (label, found) in enumerate(runs.items()):
            for split, style in (("train", "-"), ("eval", "--")):
                if (name, split) in found:
                    steps, values = found[name, split]
                    axis.plot(
                        steps,
                        values,
                        style,
                        color=colours(index % colours.N),
                        marker="o" if len(steps) < _POINTS else None,
                        markersize=3,
                        label=f"{label} ({split})",
                    )
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(order) :]:
        axis.axis("off")
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles))
    )
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise UserError(f"--output={output} cannot be written ({error.strerror}).") from error
    finally:
        pyplot.close(figure)
