"""`tftpu status`, `plot` and `profile`: views of the files of a workdir."""

import functools
import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import tftpu
from tests.support import warm
from tests.support.models.training import compiled, data, make_trainer, slowly
from tftpu.errors import UserError
from tftpu.launch import main as command_line
from tftpu.launch.commands import plot, profile, status
from tftpu.launch.commands.status import format_status
from tftpu.runtime import goodput
from tftpu.storage import files, locks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the workdir of a finished run of 60 steps, five of them profiled."""
    workdir = tmp_path_factory.mktemp("runs") / "fast"
    trainer = make_trainer(compiled(), workdir, log_every=10, checkpoint_every=20, profile="40:45")
    trainer.fit(data().cache().repeat(), steps=60, validation_data=data(), eval_every=30)
    return workdir


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    """Returns the workdir of a run with 0.1 s of input per batch, with a profile of 6 steps."""
    workdir = tmp_path_factory.mktemp("runs") / "starved"
    trainer = make_trainer(compiled(), workdir, log_every=2, profile="4:10")
    slow = data().cache().repeat().map(functools.partial(slowly, seconds=0.1))
    trainer.fit(slow, steps=12)
    return workdir


# Status


def test_the_status_of_a_finished_run_matches_its_files(run):
    record = status.read_status(str(run))
    assert (record["state"], record["step"], record["steps"]) == ("finished", 60, 60)
    assert record["checkpoints"]["steps"][-1] == 60
    written = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for split in ("train", "eval"):
        last = [line for line in written if line["split"] == split][-1]
        assert record["metrics"][split]["loss"] == last["loss"]
    text = "\n".join(format_status(record))
    assert "60/60 (100%)" in text and "finished" in text and "total" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_the_state_follows_the_process_that_holds_the_workdir(run, tmp_path):
    """The run is running while the lock is held, and crashed once its holder disappears."""
    with locks.locked(str(tmp_path)):
        assert format_status(status.read_status(str(tmp_path)))[1].startswith(
            "  state       starting"
        )
    record = goodput.read(str(run)).to_json()
    record |= {"state": "running", "eta_seconds": 75.0, "step": 30}
    files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
    code = (
        "import sys, time\nfrom tftpu.storage import locks\n"
        "with locks.locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = warm.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        running = status.read_status(str(tmp_path))
        assert running["state"] == "running"
        assert "time left   1:15" in "\n".join(format_status(running))
    finally:
        holder.kill()
        holder.wait()
    assert status.read_status(str(tmp_path))["state"] == "crashed"
    with locks.locked(str(tmp_path)):  # status leaves no lock behind
        pass


def test_the_step_is_that_of_the_newest_file(run, tmp_path):
    """goodput.json is written every ten seconds, metrics.jsonl at every log line."""
    record = goodput.read(str(run)).to_json() | {"step": 0}
    files.write_whole(str(tmp_path / goodput.FILE), json.dumps(record).encode())
    files.write_whole(str(tmp_path / "metrics.jsonl"), (run / "metrics.jsonl").read_bytes())
    assert status.read_status(str(tmp_path))["step"] == 60


def test_the_status_of_runs_is_shown_beside_one_that_is_missing(run, capsys):
    assert command_line.main(["status", str(run), "/nowhere"]) == 2
    said = capsys.readouterr()
    assert "60/60" in said.out
    assert "There is no run in '/nowhere'" in said.err


def test_the_folder_of_a_search_is_shown_by_its_report(tmp_path, capsys):
    (tmp_path / "search.json").write_text("{}")
    assert command_line.main(["status", str(tmp_path)]) == 2
    assert f"run `tftpu search --report --workdir={tmp_path}`." in capsys.readouterr().err


def test_status_loads_no_tensorflow_and_prints_json_for_programs(run):
    code = (
        "import sys\nfrom tftpu.launch.main import main\n"
        "code = main(['status', sys.argv[1], '--json'])\n"
        "print(code, 'tensorflow' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.stderr.strip() == "0 False"
    assert json.loads(done.stdout)["step"] == 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["status"], "needs WORKDIR"),
        (["status", "/nowhere"], "There is no run in '/nowhere'"),
        (["plot", "/nowhere"], "There are no metrics in '/nowhere'"),
        (["plot", "/nowhere", "--output=x.doc"], ".png, .svg or .pdf"),
        (["profile", "/nowhere"], "There is no profile in '/nowhere'"),
        (["profile", "a", "b", "c"], "compares two runs"),
    ],
)
def test_missing_files_are_reported_as_the_users_mistake(arguments, sentence, capsys):
    assert command_line.main(arguments) == 2
    assert sentence in capsys.readouterr().err


# Plot


def test_the_curves_are_those_of_the_metrics_file(run):
    found = plot.read_curves(str(run))
    steps, values = found.curves["loss", "train"]
    assert steps == [10, 20, 30, 40, 50, 60]
    written = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert values == [line["loss"] for line in written if line["split"] == "train"]
    assert found.curves["loss", "eval"].steps == [30, 60]
    best = json.loads((run / "checkpoints/best").read_text())
    assert found.best._asdict() == best
    assert found.curves["loss", "eval"].values[found.curves["loss", "eval"].steps.index(
        found.best.step)] == best["value"]  # fmt: skip


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


def test_every_panel_has_a_curve_and_the_best_checkpoint_has_a_star(
    run, starved, monkeypatch, tmp_path
):
    panels = shown([run, starved], "", monkeypatch, tmp_path)
    assert list(panels)[:4] == ["loss", "accuracy", "learning_rate", "examples_per_sec"]
    assert all(axis.get_lines() for axis in panels.values())
    lines = {line.get_label(): line for line in panels["loss"].get_lines()}
    train, evaluation = lines[f"{run} (train)"], lines[f"{run} (eval)"]
    assert train.get_color() == evaluation.get_color() != lines[f"{starved} (train)"].get_color()
    assert (train.get_linestyle(), evaluation.get_linestyle()) == ("-", "--")
    (star,) = (lines[label] for label in lines if label.startswith(f"{run} (best: "))
    assert star.get_marker() == "*"
    assert panels["examples_per_sec"].get_ylim()[0] == 0
    assert panels["loss"].get_ylim()[0] > 0


def test_the_wanted_metrics_are_drawn_in_their_order_and_on_logarithmic_axes(
    run, monkeypatch, tmp_path
):
    panels = shown([run], "grad_norm, loss,examples_per_sec", monkeypatch, tmp_path, log=True)
    assert [(name, axis.get_yscale()) for name, axis in panels.items()] == [
        ("grad_norm", "log"),
        ("loss", "log"),
        ("examples_per_sec", "linear"),
    ]
    with pytest.raises(UserError, match=r"no run has the metric 'los'.*loss"):
        plot.select_metrics({"run": plot.read_curves(str(run))}, "los")


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


def test_a_picture_of_two_runs_is_written(run, starved, tmp_path, capsys):
    from matplotlib import image

    output = tmp_path / "curves.png"
    assert command_line.main(["plot", str(run), str(starved), f"--output={output}"]) == 0
    picture = image.imread(output)
    assert picture.shape[0] > 300 and picture.shape[1] > 1000
    # White is what nothing was drawn on.
    assert 0.01 < np.mean(picture[..., :3].min(-1) < 0.9) < 0.5


def test_runs_are_named_by_their_folders_as_far_as_these_differ():
    assert plot.choose_labels(["runs/a", "runs/b/"]) == ["a", "b"]
    assert plot.choose_labels(["x/a", "y/a"]) == ["x/a", "y/a"]
    with pytest.raises(tftpu.UserError, match="twice"):
        plot.choose_labels(["runs/a", "runs/a"])


def test_without_matplotlib_plot_names_the_extra_to_install(run, monkeypatch, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["plot", str(run)]) == 2
    assert "pip install 'matplotlib>=" in capsys.readouterr().err


# Profile


def test_a_profile_names_its_steps_and_the_ops_of_the_model(run):
    found = profile.read(str(run))
    assert found.steps == 5
    assert any("MatMul" in op.kind for op in found.ops)
    text = "\n".join(profile.describe_profile(found))
    assert "5 steps on CPU" in text
    assert not list((run / "plugins").rglob("*.pb.tmp"))
    assert [p.suffix for p in (run / "plugins").rglob("*") if p.is_file()] == [".pb"]


def test_a_profile_of_a_starved_run_says_that_it_waits_for_its_input(run, starved):
    waits = profile.read(str(starved))
    assert waits.input_share > 0.3  # nearly all, except on a busy machine
    assert "input pipeline" in profile.find_bottleneck(waits)
    assert waits.step_ms[0] > 80
    text = "\n".join(profile.compare_profiles(profile.read(str(run)), waits))
    assert "input wait, ms" in text and "B / A" in text


def test_a_signal_asks_for_a_profile_of_a_running_process(tmp_path):
    class Signal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 20:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = make_trainer(compiled(), tmp_path, steps_per_loop=5)
    before = signal.getsignal(signal.SIGUSR1)
    trainer.fit(data(), steps=60, callbacks=[Signal()])
    assert profile.read(str(tmp_path)).steps == 10
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("trace", [None, b"cut off"])
def test_an_incomplete_profile_fails_with_a_clear_error(trace, tmp_path):
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    if trace:
        (folder / "host.xplane.pb").write_bytes(trace)
    with pytest.raises(UserError, match="The newest profile cannot be read"):
        profile.read(str(tmp_path))


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "plugins").write_text("in the way")
    trainer = make_trainer(compiled(), tmp_path, profile="5:10")
    trainer.fit(data(), steps=20)
    assert "The profile could not be written" in caplog.text
    assert trainer.checkpoints.list_steps() == [20]


def test_a_slow_device_loop_is_followed_by_a_profile(tmp_path, capfd):
    class Stall(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 30:
                trainer._profiler.observe(1000.0)  # as the loop of step 30 would have

    trainer = make_trainer(compiled(), tmp_path, steps_per_loop=1, profile="slow")
    for _ in range(100):  # loops so long that on a busy machine no true one counts as slow
        trainer._profiler.observe(100.0)
    trainer.fit(data().cache().repeat(), steps=60, callbacks=[Stall()])
    assert profile.read(str(tmp_path)).steps == 10
    assert capfd.readouterr().err.count("profiling the next 10 steps") == 1
    assert len(trainer._profiler._loops) > 101  # the run's own loops were recorded as well
    assert trainer.account.clock.sum_seconds()["profiling"] > 0
