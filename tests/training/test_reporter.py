"""What a run says of itself: the time that is left."""

from tftpu.training.reporter import Evaluations


def test_evaluations_that_are_left_take_as_long_as_the_last():
    known = Evaluations(step=0)
    assert known.estimate_seconds_left(100) == 0  # nothing is known of them
    known = known.follow(10, spent=5.0).follow(30, spent=7.0)
    assert known.last == 2.0 and known.every == 20
    assert known.estimate_seconds_left(100) == 4 * 2.0  # after 50, 70, 90 and 100 steps
    assert known.estimate_seconds_left(30) == 0
