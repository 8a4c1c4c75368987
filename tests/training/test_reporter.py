"""Reports of a run: the time that is left."""

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
