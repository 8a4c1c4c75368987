"""The file that the agent of a tuning job on Vertex AI reads: one line for each evaluation."""

import json
import shutil

import pytest

from tests.support.models.training import compiled, data, make_trainer
from tftpu.errors import UserError
from tftpu.observe.hypertune import Hypertune
from tftpu.observe.writers import Writers

# What cloudml-hypertune 0.1.0.dev6 wrote for trial 7, but for the time.
WRITTEN = (
    '{"accuracy": "0.75", "checkpoint_path": "", "global_step": "40", "timestamp": 0, '
    '"trial": "7"}\n'
    '{"accuracy": "0.30000000000000004", "checkpoint_path": "", "global_step": "80", '
    '"timestamp": 0, "trial": "7"}\n'
    '{"accuracy": "1.0", "checkpoint_path": "", "global_step": "120", "timestamp": 0, '
    '"trial": "7"}\n'
    '{"accuracy": "1e-07", "checkpoint_path": "", "global_step": "160", "timestamp": 0, '
    '"trial": "7"}\n'
)
VALUES = {40: 0.75, 80: 0.1 + 0.2, 120: 1, 160: 1e-7}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "agent" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "7")
    return path


def steps(file) -> list[int]:
    return [int(json.loads(line)["global_step"]) for line in file.read_text().splitlines()]


def report(writer: Hypertune, *at: int) -> None:
    for step in at:
        writer.write(step, "eval", {"loss": 1.0, "accuracy": 0.5})


def test_the_lines_are_those_of_googles_own_package(file, monkeypatch):
    monkeypatch.setattr("tftpu.observe.hypertune.time.time", lambda: 0)
    writer = Hypertune("accuracy")
    for step, value in VALUES.items():
        writer.write(step, "train", {"loss": 1.0, "accuracy": 0.0})
        writer.write(step, "eval", {"loss": 1.0, "accuracy": value})
        writer.write(step, "host", {"goodput/step": 1.0})
    assert file.read_text() == WRITTEN


def test_an_evaluation_that_is_repeated_replaces_its_line(file):
    report(Hypertune("accuracy"), 10, 20, 30)
    again = Hypertune("accuracy")  # it was killed, and resumes on the same machine from step 10
    report(again, 20)
    assert steps(file) == [10, 20]
    report(again, 30, 40, 30)  # and rolls back from step 40
    assert steps(file) == [10, 20, 30]


def test_lines_of_another_trial_and_a_torn_one_are_dropped(file, monkeypatch):
    report(Hypertune("accuracy"), 10)
    with file.open("a") as end:
        end.write('{"accuracy": "0.')
    report(Hypertune("accuracy"), 20)
    assert steps(file) == [10, 20]
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "8")
    report(Hypertune("accuracy"), 20)
    assert steps(file) == [20]


def test_the_newest_hundred_lines_are_kept_as_by_the_package(file):
    report(Hypertune("accuracy"), *range(1, 111))
    assert steps(file) == list(range(11, 111))


def test_a_value_that_is_not_finite_is_no_result(file):
    writer = Hypertune("loss")
    writer.write(10, "eval", {"loss": float("nan")})
    assert not file.exists()


def test_an_evaluation_without_the_metric_is_a_warning_that_names_those_it_has(file, caplog):
    sink = Writers([Hypertune("accuracy")])
    sink.write(10, "eval", {"loss": 1.0, "acc": 0.5})
    sink.write(20, "eval", {"loss": 1.0})
    sink.write(30, "eval", {"loss": 1.0, "accuracy": 0.5})
    assert steps(file) == [30]
    [said] = caplog.messages
    assert "evaluation has no 'accuracy': set train.best_metric to what it has, loss, acc)" in said


def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    with pytest.raises(UserError, match=r"'hypertune' cannot use .*output.metrics.*train.writers"):
        Hypertune("loss")


@pytest.mark.slow
def test_a_run_reports_every_evaluation_once_also_after_a_resume(tmp_path, file):
    def fit(steps: int) -> None:
        options = {"writers": ("hypertune",), "best_metric": "accuracy", "checkpoint_every": 10}
        trainer = make_trainer(compiled(), tmp_path / "run", keep=9, **options)
        trainer.fit(data(), steps=steps, validation_data=data(), eval_every=10)

    fit(30)
    for step in (20, 30):  # as if it had been killed before these were saved
        for folder in (tmp_path / "run" / "checkpoints").glob(f"*{step}*"):
            shutil.rmtree(folder)
    fit(50)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    expected = {line["step"]: line["accuracy"] for line in lines if line["split"] == "eval"}
    assert list(expected) == [10, 20, 30, 40, 50]
    reported = [json.loads(line) for line in file.read_text().splitlines()]
    assert {int(r["global_step"]): float(r["accuracy"]) for r in reported} == expected
    assert len(reported) == 5


@pytest.mark.medium
def test_a_run_without_the_metric_or_an_evaluation_fails_before_it_trains(tmp_path, file):
    options = {"writers": ("hypertune",), "best_metric": "acuracy"}
    with pytest.raises(UserError, match="best_metric is 'acuracy', but the evaluation has no"):
        make_trainer(compiled(), tmp_path / "run", **options).fit(
            data(), steps=1, validation_data=data()
        )
    with pytest.raises(UserError, match="nothing is evaluated"):
        make_trainer(compiled(), tmp_path / "other", **options).fit(data(), steps=1)
    assert not file.exists()
