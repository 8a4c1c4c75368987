"""The picture of a search: curves of trials, parallel coordinates, importance of fields."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from tftpu.launch.search.plan import Plan
from tftpu.launch.search.report import FEWEST, rank_complete
from tftpu.launch.search.space import Dimension
from tftpu.storage import files

FILE = "search.png"
_GREY = "#bbbbbb"  # the color of trials that were pruned
_MAP = colormaps["viridis_r"]  # the colors of trials; the best are dark


def write(
    plan: Plan, study: optuna.Study, space: Sequence[Dimension], workdir: str
) -> tuple[str, dict[str, float]] | None:
    """Draws the picture of a search into its workdir.

    Args:
        plan: the plan of the search.
        study: the Optuna study.
        space: the space of the search.
        workdir: the workdir of the search, local or `gs://`.

    Returns:
        The picture's path, and the importance by field, which sums to 1, or is {} if all trials
        have the same value; None while too few trials are complete.
    """
    ranked = rank_complete(plan, study.get_trials(deepcopy=False))
    if len(ranked) < FEWEST:
        return None
    importance = _compute_importance(study, ranked)
    data = io.BytesIO()
    draw_figure(plan, study, space, importance).savefig(data, format="png", dpi=110)
    path = files.join(workdir, FILE)
    files.write_whole(path, data.getvalue())
    return path, importance


def draw_figure(
    plan: Plan, study: optuna.Study, space: Sequence[Dimension], importance: dict[str, float]
) -> Figure:
    """Returns the picture of a search that has at least two complete trials."""
    trials = study.get_trials(deepcopy=False)
    ranked = rank_complete(plan, trials)
    colours = {t.number: _MAP(1 - i / (len(ranked) - 1)) for i, t in enumerate(ranked)}
    pruned = [t for t in trials if t.state == TrialState.PRUNED]
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.1))
    curves, bars = figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[0, 2])
    _draw_curves(curves, plan, ranked, pruned, colours)
    _draw_importance(bars, importance)
    _draw_parallel(figure.add_subplot(grid[1, :]), plan, space, ranked, pruned, colours)
    return figure


def _compute_importance(study: optuna.Study, complete: Sequence[FrozenTrial]) -> dict[str, float]:
    """Returns the share of each field in the variance of the metric, by Optuna's fANOVA.

    Fields that some trials lack are left out. Returns {} if none is left, or all values are equal.
    """
    fields = [name for name in complete[0].params if all(name in t.params for t in complete)]
    if not fields or len({trial.value for trial in complete}) == 1:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return optuna.importance.get_param_importances(study, evaluator=evaluator, params=fields)


def _draw_curves(
    axes: Axes,
    plan: Plan,
    ranked: Sequence[FrozenTrial],
    pruned: Sequence[FrozenTrial],
    colours: dict[int, Any],
) -> None:
    for trial in [*pruned, *reversed(ranked)]:
        values = trial.intermediate_values
        best = trial is ranked[0]
        axes.plot(
            sorted(values),
            [values[step] for step in sorted(values)],
            color=colours.get(trial.number, _GREY),
            linewidth=2.5 if best else 1.2,
            marker="o",
            markersize=3,
            label=f"trial {trial.number}, the best" if best else None,
        )
    if pruned:
        axes.plot([], [], color=_GREY, marker="o", markersize=3, label="pruned")
    axes.set(xlabel="evaluation", ylabel=plan.metric, title="Trials")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_importance(axes: Axes, importance: dict[str, float]) -> None:
    names = list(importance)[::-1]
    bars = axes.barh(names, [importance[name] for name in names], color=_MAP(0.6))
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(title="Importance", xlim=(0, 1.15))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_parallel(
    axes: Axes,
    plan: Plan,
    space: Sequence[Dimension],
    ranked: Sequence[FrozenTrial],
    pruned: Sequence[FrozenTrial],
    colours: dict[int, Any],
) -> None:
    """Draws a line for each trial through its values, with an axis for each field."""
    values = np.array([trial.value for trial in ranked], float)
    low, high = values.min(), values.max()
    for trial in [*pruned, *reversed(ranked)]:
        heights = [_compute_height(dimension, trial) for dimension in space]
        if trial.value is not None and trial.state == TrialState.COMPLETE:
            heights.append((trial.value - low) / ((high - low) or 1))
        axes.plot(
            range(len(heights)),
            heights,
            color=colours.get(trial.number, _GREY),
            linewidth=2.5 if trial is ranked[0] else 1.2,
            marker="o",  # shows values between missing ones, which no line reaches
            markersize=3,
            alpha=1 if trial.number in colours else 0.6,
        )
    labels = [
        *(_list_marks(dimension) for dimension in space),
        [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")],
    ]
    for position, marks in enumerate(labels):
        axes.axvline(position, color="black", linewidth=0.8)
        for height, text in marks:
            axes.annotate(
                text,
                (position, height),
                (4, 0),
                textcoords="offset points",
                verticalalignment="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    axes.set_xticks(range(len(labels)), [*(d.field for d in space), plan.metric])
    axes.set(yticks=[], xlim=(-0.1, len(labels) - 0.7), ylim=(-0.08, 1.08))
    axes.set_title("Values of the trials, the best ones dark")
    axes.spines[:].set_visible(False)


def _compute_height(dimension: Dimension, trial: FrozenTrial) -> float:
    """Returns where a trial crosses the axis of a field, from 0 to 1; NaN if it lacks the field."""
    if dimension.field not in trial.params:
        return math.nan
    value = trial.params[dimension.field]
    if dimension.kind == "choice":
        return dimension.choices.index(value) / (len(dimension.choices) - 1)
    scale = math.log if dimension.kind == "log" else float
    low, high = scale(dimension.low), scale(dimension.high)
    return (scale(value) - low) / (high - low)


def _list_marks(dimension: Dimension) -> list[tuple[float, str]]:
    """Returns the heights on the axis of a field that are labelled, and their labels."""
    if dimension.kind == "choice":
        last = len(dimension.choices) - 1
        return [(index / last, choice) for index, choice in enumerate(dimension.choices)]
    return [(0.0, f"{dimension.low:g}"), (1.0, f"{dimension.high:g}")]
