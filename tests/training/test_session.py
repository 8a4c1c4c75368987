"""The tasks of a session between its device loops."""

import json
import math

import pytest

from tests.support.training import compiled, data, make_trainer
from tftpu.errors import UserError


def best_of(workdir, results: list[dict[str, float]], metric: str, monkeypatch) -> dict | None:
    """Trains two steps for each result that an evaluation is to have; returns the best one."""
    trainer = make_trainer(compiled(), workdir, best_metric=metric, steps_per_loop=2)
    left = iter(results)
    monkeypatch.setattr(trainer, "evaluate", lambda dataset: next(left))
    steps = 2 * len(results) + (trainer.checkpoints.steps() or [0])[-1]
    trainer.fit(data(), steps, validation_data=data(), eval_every=2, verbose=False)
    path = workdir / "checkpoints" / "best"
    return json.loads(path.read_text()) if path.exists() else None


def test_another_best_metric_after_a_restart_marks_its_own_best(tmp_path, monkeypatch):
    first = [{"loss": 0.9, "accuracy": 0.1}, {"loss": 1.0, "accuracy": 0.2}]
    best = best_of(tmp_path, first, "loss", monkeypatch)
    assert best == {"step": 2, "metric": "loss", "value": 0.9}
    then = [{"loss": 2.0, "accuracy": 0.3}, {"loss": 3.0, "accuracy": 0.25}]
    best = best_of(tmp_path, then, "accuracy", monkeypatch)
    assert best == {"step": 6, "metric": "accuracy", "value": 0.3}


def test_the_best_value_survives_a_restart(tmp_path, monkeypatch):
    best_of(tmp_path, [{"loss": 0.5}], "loss", monkeypatch)
    assert best_of(tmp_path, [{"loss": 0.9}], "loss", monkeypatch)["step"] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_is_never_the_best(value, tmp_path, monkeypatch, caplog):
    assert best_of(tmp_path, [{"loss": value}], "", monkeypatch) is None
    assert f"The evaluation's loss is {value} at step 2" in caplog.text
    assert best_of(tmp_path, [{"loss": 0.9}], "", monkeypatch)["step"] == 4


def test_a_best_metric_without_validation_data_fails():
    trainer = make_trainer(compiled(), best_metric="accuracy")
    with pytest.raises(UserError, match="best_metric is 'accuracy'.*needs validation_data"):
        trainer.fit(data(), 4)
