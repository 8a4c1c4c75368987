"""`tftpu plot`: the curves of runs."""

import json
import shutil

import numpy as np
import pytest

import tftpu
from tftpu.errors import UserError
from tftpu.launch import main as command_line
from tftpu.launch.commands.finished import plot
from tftpu.runtime import slow


@pytest.mark.medium
def test_the_curves_are_those_of_the_metrics_file(finished_run):
    found = plot.read_curves(str(finished_run))
    steps, values = found.curves["loss", "train"]
    assert steps == [10, 20, 30, 40, 50, 60]
    written = [json.loads(line) for line in (finished_run / "metrics.jsonl").open()]
    assert values == [line["loss"] for line in written if line["split"] == "train"]
    assert found.curves["loss", "eval"].steps == [30, 60]
    best = json.loads((finished_run / "checkpoints/best").read_text())
    assert found.best._asdict() == best
    assert found.curves["loss", "eval"].values[found.curves["loss", "eval"].steps.index(
        found.best.step)] == best["value"]  # fmt: skip


@pytest.mark.medium
def test_drawing_that_takes_long_is_said(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slow, "_SLOW", 0.0)
    assert command_line.main(["plot", str(finished_run), f"--output={tmp_path}/curves.png"]) == 0
    assert capsys.readouterr().err == "Drawing 1 run ...\n"


@pytest.mark.medium
def test_of_a_folder_of_runs_those_without_metrics_are_left_out(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "runs/a")
    (tmp_path / "runs/none").mkdir()
    (tmp_path / "runs/none/goodput.json").touch()
    output = f"--output={tmp_path}/curves.png"
    assert command_line.main(["plot", f"{tmp_path}/runs", output]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"Left out: There are no metrics in '{tmp_path}/runs/none'")
    assert "1 run in" in said.out
    assert command_line.main(["plot", f"{tmp_path}/runs/a", f"{tmp_path}/runs/none", output]) == 2
    assert "There are no metrics in" in capsys.readouterr().err


def shown(runs, metrics: str, monkeypatch, tmp_path, log: bool = False) -> dict:
    """Returns the panels of a picture by their titles."""
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    found = {str(run): plot.read_curves(str(run)) for run in runs}
    plot.draw(found, plot.select_metrics(found, metrics), str(tmp_path / "curves.svg"), log)
    monkeypatch.undo()
    pyplot.close(figures[0])
    return {axis.get_title(): axis for axis in figures[0].axes}


@pytest.mark.medium
def test_every_panel_has_a_curve_and_the_best_checkpoint_has_a_star(
    finished_run, starved_run, monkeypatch, tmp_path
):
    panels = shown([finished_run, starved_run], "", monkeypatch, tmp_path)
    assert list(panels)[:4] == ["loss", "accuracy", "learning_rate", "examples_per_sec"]
    assert all(axis.get_lines() for axis in panels.values())
    assert panels["loss"].get_ylabel() == "train: mean since the last point"
    assert panels["learning_rate"].get_ylabel() == ""  # not evaluated
    lines = {line.get_label(): line for line in panels["loss"].get_lines()}
    train, evaluation = lines[f"{finished_run} (train)"], lines[f"{finished_run} (eval)"]
    assert (
        train.get_color() == evaluation.get_color() != lines[f"{starved_run} (train)"].get_color()
    )
    assert (train.get_linestyle(), evaluation.get_linestyle()) == ("-", "--")
    (star,) = (lines[label] for label in lines if label.startswith(f"{finished_run} (best: "))
    assert star.get_marker() == "*"
    assert panels["examples_per_sec"].get_ylim()[0] == 0
    assert panels["loss"].get_ylim()[0] > 0


@pytest.mark.medium
def test_the_wanted_metrics_are_drawn_in_their_order_and_on_logarithmic_axes(
    finished_run, monkeypatch, tmp_path
):
    panels = shown(
        [finished_run], "grad_norm, loss,examples_per_sec", monkeypatch, tmp_path, log=True
    )
    assert [(name, axis.get_yscale()) for name, axis in panels.items()] == [
        ("grad_norm", "log"),
        ("loss", "log"),
        ("examples_per_sec", "linear"),
    ]
    with pytest.raises(UserError, match=r"no run has the metric 'los'.*loss"):
        plot.select_metrics({"run": plot.read_curves(str(finished_run))}, "los")


def test_a_metric_without_a_finite_value_has_no_panel(tmp_path):
    lines = [
        '{"step": 1, "split": "train", "loss": 1.0, "norm": NaN}',
        '{"step": 2, "split": "train", "loss": Infinity, "norm": NaN}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = plot.read_curves(str(tmp_path))
    assert plot.select_metrics({"run": found}, "") == ["loss"]
    assert found.curves["loss", "train"] == ([1], [1.0])


@pytest.mark.parametrize(
    ("count", "rows"), [(1, [1]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (7, [3, 2, 2])]
)
def test_panels_fill_their_rows(count, rows):
    assert plot._split_rows(count) == rows


@pytest.mark.medium
def test_a_picture_of_two_runs_is_written(finished_run, starved_run, tmp_path, capsys):
    from matplotlib import image

    output = tmp_path / "curves.png"
    assert (
        command_line.main(["plot", str(finished_run), str(starved_run), f"--output={output}"]) == 0
    )
    picture = image.imread(output)
    assert picture.shape[0] > 300 and picture.shape[1] > 1000
    # White is what nothing was drawn on.
    assert 0.01 < np.mean(picture[..., :3].min(-1) < 0.9) < 0.5


def test_runs_are_named_by_their_folders_as_far_as_these_differ():
    assert plot.choose_labels(["runs/a", "runs/b/"]) == ["a", "b"]
    assert plot.choose_labels(["x/a", "y/a"]) == ["x/a", "y/a"]
    with pytest.raises(tftpu.UserError, match="twice"):
        plot.choose_labels(["runs/a", "runs/a"])


def test_without_matplotlib_plot_names_the_extra_to_install(finished_run, monkeypatch, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["plot", str(finished_run)]) == 2
    assert "pip install 'matplotlib>=" in capsys.readouterr().err


def test_of_equal_runs_the_first_is_seen_beside_the_second(finished_run, monkeypatch, tmp_path):
    shutil.copytree(finished_run, tmp_path / "again")
    panels = shown([finished_run, tmp_path / "again"], "loss", monkeypatch, tmp_path)
    lines = {line.get_label(): line for line in panels["loss"].get_lines()}
    for split in ("(train)", "(eval)", "(best: "):
        first, second = (
            next(line for label, line in lines.items() if label.startswith(f"{run} {split}"))
            for run in (finished_run, tmp_path / "again")
        )
        wider = first.get_linewidth() > second.get_linewidth() + 1
        assert first.get_markersize() > second.get_markersize() and (wider or split == "(best: ")


@pytest.mark.parametrize("panels", [1, 2])
def test_the_legend_of_long_names_is_whole(panels, monkeypatch, tmp_path):
    from matplotlib import pyplot

    curves = {(name, "train"): plot.Curve([1, 2], [1.0, 2.0]) for name in ("loss", "norm")}
    runs = {f"a_run_with_a_{'very_' * 8}long_name_{n}": plot.RunCurves(curves) for n in range(3)}
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot.draw(runs, ["loss", "norm"][:panels], str(tmp_path / "curves.svg"), False)
    monkeypatch.undo()
    (figure,) = figures
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    pyplot.close(figure)
    assert len(figure.legends) == 1 and len(figure.legends[0].get_texts()) == 3
    assert box.x0 >= 0 and box.y0 >= 0
    assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.axes[0].get_window_extent().y0
