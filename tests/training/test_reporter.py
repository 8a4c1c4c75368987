"""Reports of a run: the time that is left, and samples."""

import keras
import pytest

import tftpu
from tests.support.models.training import data
from tftpu.observe.writers import Writer
from tftpu.training.reporter import Evaluations


def test_evaluations_that_are_left_take_as_long_as_the_last():
    known = Evaluations(step=0).follow(10, spent=5.0)
    assert known.estimate_seconds_left(100) == 0  # the first one compiles
    known = known.follow(30, spent=7.0)
    assert known.last == 2.0 and known.every == 20
    assert known.estimate_seconds_left(100) == 4 * 2.0  # after 50, 70, 90 and 100 steps
    assert known.estimate_seconds_left(30) == 0


def test_a_run_that_resumes_between_two_evaluations_learns_their_distance():
    known = Evaluations(step=None, spent=300.0)  # of an earlier `fit` in the same process
    known = known.follow(200, spent=330.0)
    assert known.last is None and known.estimate_seconds_left(1000) == 0
    known = known.follow(300, spent=360.0)
    assert known.last == 30.0 and known.estimate_seconds_left(1000) == 7 * 30.0


@pytest.mark.medium
def test_a_text_of_a_users_own_is_shown_also_with_a_loss_function(tmp_path):
    found = []

    class Texts(Writer):
        def write_text(self, step, name, text):
            if name == "sample":
                found.append((step, text))

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    trainer = tftpu.Trainer(
        model,
        tmp_path,
        loss_fn=lambda model, batch, training: model(batch[0])[:, 0] ** 2,
        writers=[Texts()],
        sample=lambda trainer: f"after {trainer.step} steps",
    )
    trainer.fit(data(), steps=2, validation_data=data(), verbose=0)
    assert found == [(2, "```\nafter 2 steps\n```")]
