"""The search of a plan, against trying every candidate."""

import itertools
import random

import pytest

from tftpu.launch.plan import search as plan
from tftpu.launch.plan.bounds import Estimate
from tftpu.launch.plan.candidates import Candidate
from tftpu.launch.plan.search import Goal, Search, Verdict

LIMIT = 1000
REMATS = {"none": (8.0, 1.0), "products": (4.0, 1.1), "block": (1.0, 1.35), "offload": (0.5, 1.6)}


class Machine:
    """A made-up model and slices: activations shrink with microbatches, `fsdp` cuts the state."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.state = draw.choice([200, 900, 2500])
        self.activations = draw.choice([50, 200, 800])
        self.slow = {mesh: draw.uniform(1, 2) for mesh in ("data:4", "data:2,fsdp:2", "fsdp:4")}
        self.usd = {"a": draw.uniform(1, 4), "b": draw.uniform(1, 4)}
        self.speed = {"a": draw.uniform(1, 3), "b": draw.uniform(1, 3)}
        names = itertools.product(self.usd, self.slow, REMATS, (1, 2, 4), ("plain", "flash"))
        self.candidates = [Candidate(*one) for one in names]

    def estimate(self, one):
        state = self._measure_state(one)
        floor = 0.4 / self.speed[one.slice]
        return Estimate(one, state, state, state, LIMIT, floor, 2 * floor, self.usd[one.slice])

    def _measure_state(self, one):
        return self.state // {"data:4": 1, "data:2,fsdp:2": 2, "fsdp:4": 4}[one.mesh]

    def examine(self, one):
        kept, work = REMATS[one.remat]
        plain = one.attention == "plain"
        held = self.activations * (kept + 2 * plain) / one.microbatches
        needs = int(self._measure_state(one) + held)
        if needs > LIMIT:
            return Verdict(False, needs, error="no", too_large=True)
        seconds = work * self.slow[one.mesh] / self.speed[one.slice]
        seconds *= (1 + 0.1 * one.microbatches) * (0.9 if plain else 1.0)
        return Verdict(True, needs, step_seconds=seconds)


def search_through(machine, goal):
    search = Search(map(machine.estimate, machine.candidates), goal)
    while (one := search.choose_next()) is not None:
        search.record(one, machine.examine(one))
    return search


def try_all(machine, goal):
    verdicts = {one: machine.examine(one) for one in machine.candidates}
    ranks = [
        goal.rank(verdict.step_seconds, machine.usd[one.slice])
        for one, verdict in verdicts.items()
        if verdict.fits
    ]
    return min(ranks, default=None)


@pytest.mark.parametrize(
    "goal", [Goal(3600), Goal(3600, budget=2.0), Goal(3600, deadline=2500.0)], ids=str
)
@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_that_of_trying_all_and_few_are_compiled(seed, goal):
    machine = Machine(seed)
    search, best = search_through(machine, goal), try_all(machine, goal)
    found = search.list_best()
    if best is None or best[0]:
        assert not found or not search.meets_goal(found[0])
    else:
        assert search.rank(found[0]) == best
    assert search.size == len(search.verdicts) + len(search.pruned) == len(machine.candidates)
    assert search.left == 0 and len(search.verdicts) < search.size / 2


def estimate_of(candidate, least=1.0, usd=1.0, held=100, state=100):
    return Estimate(candidate, state, held, held, LIMIT, least, least, usd)


ONE = Candidate("a", "fsdp:4", "none", 1)
OTHER = Candidate("b", "fsdp:4", "none", 1)


CHEAPEST = Goal(3600)


def prune(estimates, goal=CHEAPEST, verdicts=()):
    search = Search(estimates, goal)
    for candidate, verdict in verdicts:
        search._running.add(candidate)
        search._waiting = [e for e in search._waiting if e.candidate != candidate]
        search.record(candidate, verdict)
    search.choose_next()
    return search.pruned


def test_what_does_not_fit_by_arithmetic_is_not_compiled():
    assert prune([estimate_of(ONE, held=LIMIT + 1)]) == {ONE: plan.STATE}
    assert prune([estimate_of(ONE, held=LIMIT)]) == {}


def test_a_budget_and_a_deadline_prune_by_the_floor():
    assert prune([estimate_of(ONE, usd=2.0)], Goal(3600, budget=1.9)) == {ONE: plan.OVER_BUDGET}
    assert prune([estimate_of(ONE, usd=2.0)], Goal(3600, budget=2.0)) == {}
    assert prune([estimate_of(ONE)], Goal(3600, deadline=3599.0)) == {ONE: plan.TOO_SLOW}
    assert prune([estimate_of(ONE)], Goal(3600, deadline=3600.0)) == {}


def test_what_is_no_cheaper_at_its_peak_than_the_best_is_not_compiled():
    both = [estimate_of(ONE), estimate_of(OTHER, usd=3.01)]
    assert prune(both, verdicts=[(ONE, Verdict(True, step_seconds=3.0))]) == {OTHER: plan.NO_BETTER}
    assert prune(both, verdicts=[(ONE, Verdict(True, step_seconds=3.1))]) == {}


def test_what_fits_without_a_price_prunes_nothing():
    more = Candidate("a", "fsdp:4", "block", 1)
    both = [estimate_of(ONE), estimate_of(more)]
    assert prune(both, verdicts=[(ONE, Verdict(True))]) == {}
    assert prune(both, verdicts=[(ONE, Verdict(True, step_seconds=2.0))]) == {more: plan.SLOWER}


def test_the_number_of_microbatches_is_raised_until_the_rest_beside_the_state_can_fit():
    ladder = [Candidate("a", "fsdp:4", "none", n) for n in (1, 2, 4, 8)]
    estimates = [estimate_of(one) for one in ladder]
    # 4,100 of 1,000: beside 100 of state, 2,000 with two microbatches, 1,000 with four.
    failed = Verdict(False, 4100, error="no", too_large=True)
    found = prune(estimates, verdicts=[(ladder[0], failed)])
    assert found == dict.fromkeys(ladder[1:3], plan.NEEDS_MORE)


def test_what_runs_is_awaited_before_others_with_its_mesh():
    same = Candidate("a", "fsdp:4", "block", 1)
    search = Search([estimate_of(ONE), estimate_of(same), estimate_of(OTHER, usd=9.0)], Goal(1))
    assert {search.choose_next(), search.choose_next()} >= {OTHER}
    assert search.choose_next() is None and search.left == 3


def test_a_crash_says_nothing_about_other_candidates():
    more = Candidate("a", "fsdp:4", "none", 2)
    failed = Verdict(False, error="crashed")
    assert prune([estimate_of(ONE), estimate_of(more)], verdicts=[(more, failed)]) == {}


def test_known_verdicts_are_recorded_without_examining():
    search = Search([estimate_of(ONE), estimate_of(OTHER)], Goal(3600))
    known = {ONE: Verdict(True, step_seconds=3.0)}
    assert search.choose_unknown(known) == OTHER
    assert search.verdicts == known
