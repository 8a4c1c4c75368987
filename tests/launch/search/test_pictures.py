"""The picture of a search: what it draws is what the study holds."""

import math

import pytest
from optuna.trial import TrialState

from tests.support.searches import plan
from tftpu.launch.search import pictures, space
from tftpu.launch.settings import config_flags

TEXTS = ("optimizer.learning_rate=log:1e-4..1", "model.width=choice:8,16,32")
# Rate, index of the width, evaluations; one without a last evaluation was pruned.
TRIALS = [(1e-4, 0, (0.1, 0.2)), (1e-2, 2, (0.3, 0.9)), (1, 1, (0.5, 0.6)), (0.1, 2, (0.4,))]
TRIALS += [(1e-3, 1, (0.2, 0.7))]


@pytest.fixture
def drawn(tmp_path):
    """Returns the three parts of a picture."""
    one = plan(space=TEXTS)
    study = one.open_study(str(tmp_path))
    dimensions = space.parse(TEXTS, config_flags.load("digits_resnet", []))
    for rate, width, evaluations in TRIALS:
        fixed = {"optimizer.learning_rate": rate, "model.width": ("8", "16", "32")[width]}
        study.enqueue_trial(fixed)
        trial = study.ask()
        space.suggest(dimensions, trial)
        for number, value in enumerate(evaluations, 1):
            trial.report(value, number)
        pruned = len(evaluations) == 1
        study.tell(trial, *(() if pruned else (evaluations[-1],)), **_state(pruned))
    shares = {"model.width": 0.25, "optimizer.learning_rate": 0.75}
    return pictures.draw_figure(one, study, dimensions, shares).axes


def _state(pruned):
    return {"state": TrialState.PRUNED} if pruned else {}


def lines_of(axes, count):
    """Returns the points of the first lines, in order, up to a number of lines."""
    found = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    return sorted([tuple(map(float, p)) for p in points] for points in found if points)[:count]


def test_the_curves_are_the_evaluations_of_all_trials(drawn):
    found = lines_of(drawn[0], len(TRIALS))
    assert found == sorted(
        [(float(number), value) for number, value in enumerate(evaluations, 1)]
        for *_, evaluations in TRIALS
    )


def test_the_best_trial_is_named(drawn):
    (best,) = [line for line in drawn[0].lines if "the best" in str(line.get_label())]
    assert list(best.get_ydata()) == [0.3, 0.9] and "trial 1," in best.get_label()


def test_the_bars_are_the_importance(drawn):
    widths = [bar.get_width() for bar in drawn[1].patches]
    names = [text.get_text() for text in drawn[1].get_yticklabels()]
    assert dict(zip(names, widths, strict=True)) == {
        "model.width": 0.25,
        "optimizer.learning_rate": 0.75,
    }


def test_a_line_crosses_each_axis_where_the_trial_has_its_value(drawn):
    crossed = [
        [float(y) for y in line.get_ydata()] for line in drawn[2].lines if line.get_marker() == "o"
    ]
    expected = []
    for rate, width, evaluations in TRIALS:
        heights = [1 + math.log10(rate) / 4, width / 2]
        # The best value is at the top of the last axis, the worst one at its bottom.
        heights += [(evaluations[1] - 0.2) / 0.7] if len(evaluations) == 2 else []
        expected.append(heights)
    for found, known in zip(sorted(crossed), sorted(expected), strict=True):
        assert found == pytest.approx(known)
