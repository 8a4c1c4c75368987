"""`tftpu search`: trials, pruning, continuing, failures, what it prints and draws."""

import json
import os
import shutil
import signal

import pytest
from PIL import Image

from tests.support.searches import TINY, result, started, table
from tftpu.launch import main as command_line


def search(*words):
    return command_line.main(list(words))


def failing(folder):
    """Returns the words of a search whose metric the trials do not have, which they find out."""
    (folder / "own.py").write_text(
        "from tftpu.launch.configs.digits_resnet import get_config as digits\n\n\n"
        "def get_config():\n"
        "    experiment = digits()\n"
        "    experiment.loss, experiment.train.label_smoothing = LOSS, 0.0\n"
        "    return experiment\n\n\n"
        "LOSS = 'sparse_categorical_crossentropy'\n"
    )
    return ("search", f"--config={folder}/own.py", *TINY[2:], "--metric=acuracy")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Returns the workdir of a search of five trials, continued to seven, and what it printed."""
    workdir = tmp_path_factory.mktemp("searches") / "done"
    outputs = []
    for trials in (5, 7):
        process = started(*TINY, f"--trials={trials}", "--parallel=2", f"--workdir={workdir}")
        outputs.append(process.communicate(timeout=300)[0])
        assert process.returncode == 0, outputs[-1]
    return workdir, outputs


@pytest.mark.slow
def test_a_search_runs_its_trials_and_is_continued_by_a_second_command(done):
    workdir, outputs = done
    trials = table(str(workdir))
    assert len(trials) == 7 and all(trial["told"] == 1 for trial in trials)
    assert "7 trials of 7" in outputs[1]
    begun = [line.split()[1] for line in outputs[1].splitlines() if "begins" in line]
    assert begun == ["5", "6"]  # those of the first command are not run again
    drawn = [tuple(trial["overrides"]) for trial in trials]
    assert len(set(drawn)) == 7


@pytest.mark.slow
def test_the_value_of_a_trial_is_the_best_evaluation_of_its_run(done):
    workdir, _ = done
    complete = [n for n, trial in enumerate(table(str(workdir))) if trial["value"] is not None]
    assert complete
    for number in complete:
        trial, found = table(str(workdir))[number], result(workdir, number)
        lines = (workdir / "trials" / f"{number:04d}" / "run" / "metrics.jsonl").open()
        evaluated = [e["accuracy"] for e in map(json.loads, lines) if e["split"] == "eval"]
        if len(evaluated) == 4:
            assert trial["value"] == found["best"]["value"] == max(evaluated)
            assert list(trial["reports"].values()) == pytest.approx(evaluated)
            assert found["steps"] == 20 and found["evaluation"]["accuracy"] == evaluated[-1]


@pytest.mark.slow
def test_the_run_of_a_trial_is_that_of_its_config_and_best_metric(done):
    """The table of hyper-parameters lacks what the search adds to it."""
    workdir, _ = done
    config = json.loads((workdir / "trials" / "0000" / "run" / "config.json").read_text())
    assert config["callbacks"] == [] and config["train"]["best_metric"] == "accuracy"
    (override,) = table(str(workdir))[0]["overrides"]
    assert override == f"--config.optimizer.learning_rate={config['optimizer']['learning_rate']:g}"


@pytest.mark.slow
def test_the_report_gives_the_best_config_as_a_command_that_trains(done, capsys):
    workdir, outputs = done
    assert search("search", "--report", f"--workdir={workdir}") == 0
    text = capsys.readouterr().out
    assert outputs[1].endswith(text)  # the search itself ends with it
    trials = [trial for trial in table(str(workdir)) if trial["state"] == 1]
    best = max(trials, key=lambda trial: trial["value"])
    (command,) = [line for line in text.splitlines() if "best config" in line]
    words = command.split("tftpu ")[1].split()
    assert words[0] == "train" and words[-1] == best["overrides"][0]
    assert "optimizer.learning_rate 100%" in text
    found = json.loads((workdir / "result.json").read_text())
    assert (found["trials"], found["complete"]) == (7, len(trials))
    assert (found["best"]["metric"], found["best"]["value"]) == ("accuracy", best["value"])
    assert found["best"]["overrides"] == best["overrides"]


@pytest.mark.slow
def test_a_search_draws_a_picture(done):
    workdir, _ = done
    with Image.open(workdir / "search.png") as picture:
        assert picture.format == "PNG" and picture.width > 1000


@pytest.mark.slow
def test_another_search_or_a_changed_one_does_not_enter_its_workdir(done, capsys):
    workdir, _ = done
    where = f"--workdir={workdir}"
    assert search(*TINY, "--config.train.steps=30", where) == 2
    assert "differs in config: train.steps was" in capsys.readouterr().err
    assert search(*TINY, "--sampler=random", where) == 2
    assert "differs in sampler: 'tpe', not 'random'" in capsys.readouterr().err
    assert search("search", "--report", "--trials=9", where) == 2
    assert "--trials cannot change: leave" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search",), "needs CONFIG"),
        (("search", "--join"), "needs the --workdir=DIR"),
        (("search", "--report", "--workdir={}"), "There is no search in"),
        (("search", "--config=digits_resnet", "--workdir={}"), "nothing to search"),
        ((*TINY, "--workdir={}", "--sampler=tp"), "Did you mean 'tpe'"),
        ((*TINY, "--workdir={}", "--pruner=none", "--budget_usd=1"), "needs --slice"),
        ((*TINY, "--workdir={}", "--slice=v5x-8"), "v5x"),
        ((*TINY, "--workdir={}", "--trials=0"), "--trials"),
        ((*TINY, "--workdir={}", "--config.optimizer.learning_rate=1"), "a field of the space"),
        ((*TINY, "--workdir={}", "--metric=acuracy"), "Did you mean 'accuracy'"),
        (
            (*TINY, "--workdir={}", "--metric=accuracy", "--config.train.best_metric=loss"),
            "--config.train.best_metric=loss and --metric=accuracy name different",
        ),
        ((*TINY, "--workdir={}", "--space=optimizer.name=choice:sgd,adamww"), "'adamw'"),
        (("search", "--report", "--workdir={}", "--parallel=1"), "leave out --join and --parallel"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(words, said, tmp_path, capsys):
    assert search(*(word.format(tmp_path / "new") for word in words)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_space_may_be_in_the_config_file(tmp_path, capsys):
    config = tmp_path / "spaced.py"
    config.write_text(
        "from tftpu.launch.configs.digits_resnet import get_config\n\n\n"
        "def get_space():\n"
        "    return ['optimizer.learning_rate=log:1..0.1']\n"
    )
    words = ("search", f"--config={config}", f"--workdir={tmp_path / 'runs'}")
    assert search(*words) == 2
    assert "the lower bound 1 must be below 0.1" in capsys.readouterr().err
    config.write_text(config.read_text().replace("return [", "return 7, ["))
    assert search(*words) == 2
    assert "it must return a list of texts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_ends_and_says_why(tmp_path):
    words, workdir = failing(tmp_path), tmp_path / "search"
    process = started(*words, f"--workdir={workdir}", "--trials=9")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2
    assert "3 trials failed and none is complete" in output
    assert f"See {workdir}/logs/0002.log." in output
    assert (
        "best_metric is 'acuracy', but the evaluation has no such" in output
        and "Traceback" not in output
    )
    assert "3 trials of 9" in output  # what there is, is reported nevertheless
    assert len(table(str(workdir))) == 3


@pytest.mark.slow
def test_trials_that_diverge_are_pruned_and_a_search_without_others_found_nothing(tmp_path):
    words = [word for word in TINY if not word.startswith("--space")]
    space = "--space=optimizer.learning_rate=uniform:1e12..1e13"
    process = started(
        *words, space, "--config.optimizer.warmup_steps=0", "--trials=2", f"--workdir={tmp_path}"
    )
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "No trial is complete" in output
    assert [(t["state"], t["told"]) for t in table(str(tmp_path))] == [(2, 1)] * 2
    assert "trial 1   diverged" in output and "failed" not in output


@pytest.mark.slow
def test_a_damaged_record_is_named(done, tmp_path, capsys):
    workdir, _ = done
    shutil.copytree(workdir / "study", tmp_path / "study")
    shutil.copy(workdir / "search.json", tmp_path)
    (tmp_path / "study" / "00000002.jsonl").write_text("garb")
    assert search("search", "--report", f"--workdir={tmp_path}") == 2
    assert "00000002.jsonl of the search's record is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_asked_to_stop_saves_its_trials_and_resumes_them(number, tmp_path):
    words = (*TINY, "--config.train.steps=4000", "--trials=1", f"--workdir={tmp_path}")
    process = started(*words)
    log = tmp_path / "logs" / "0000.log"
    while not (log.exists() and "step 5/" in log.read_text()):
        assert process.poll() is None
    os.kill(process.pid, number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and "the same command resumes" in output
    assert table(str(tmp_path))[0]["told"] == 0
    again = started(*words)
    while "Resuming from the checkpoint" not in log.read_text():
        assert again.poll() is None
    os.kill(again.pid, signal.SIGTERM)
    again.communicate(timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_its_processes_stops_a_search_that_has_just_begun(number, tmp_path):
    """The terminal's Ctrl-C arrives while the server of the trials imports TensorFlow."""
    process = started(*TINY, "--trials=1", f"--workdir={tmp_path}")
    assert "begins" in process.stdout.readline()
    os.killpg(process.pid, number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and "Traceback" not in output, output


@pytest.mark.slow
def test_a_trial_that_trained_to_its_end_is_complete(tmp_path):
    """Its only evaluation is its last one, at which a pruner has nothing to end."""
    words = ("--config.train.eval_every=20", "--trials=8", f"--workdir={tmp_path}")
    process = started(*TINY, *words)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert [trial["state"] for trial in table(str(tmp_path))] == [1] * 8


@pytest.mark.slow
def test_a_search_without_a_trial_that_succeeded_is_no_success(tmp_path):
    process = started(*failing(tmp_path), f"--workdir={tmp_path / 'search'}", "--trials=1")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2
    assert "No trial is complete" in output and "Traceback" not in output


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert search(*TINY, f"--workdir={tmp_path}/file/search") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_values_that_are_drawn_again_are_shown_once(tmp_path):
    words = ("--space=optimizer.momentum=choice:0.5,0.9", "--trials=6", "--pruner=none")
    process = started(*TINY[:-1], *words, f"--workdir={tmp_path}")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "the same as trial" in output
    assert output.split("6 trials of 6")[1].count("  trial ") == 2
    assert len(list(tmp_path.glob("trials/*/run"))) == 2
