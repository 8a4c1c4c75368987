"""The search of a plan, against trying every candidate."""

import dataclasses
import io
import itertools
import random
import re
import types

import pytest
from rich.console import Console

from tftpu.launch.plan import search as plan
from tftpu.launch.plan import table
from tftpu.launch.plan.bounds import Estimate
from tftpu.launch.plan.candidates import Candidate
from tftpu.launch.plan.search import Goal, Search, Verdict
from tftpu.preflight.columns import build_table

LIMIT = 1000
REMATS = {
    "none": (8.0, 1.0),
    "products": (4.0, 1.1),
    "attention": (1.5, 1.3),
    "block": (1.0, 1.35),
    "offload": (0.5, 1.6),
}


class Machine:
    """A made-up model and slices: activations shrink with microbatches, `fsdp` cuts the state.

    What its closed forms expect, which is the order of compiling, is drawn.
    """

    def __init__(self, seed):
        self._draw = draw = random.Random(seed)
        self.state = draw.choice([200, 900, 2500])
        self.activations = draw.choice([50, 200, 800])
        self.sums = draw.choice([0, 100, 300])  # of the gradients of several microbatches
        self.slow = {mesh: draw.uniform(1, 2) for mesh in ("data:4", "data:2,fsdp:2", "fsdp:4")}
        self.usd = {"a": draw.uniform(1, 4), "b": draw.uniform(1, 4)}
        self.speed = {"a": draw.uniform(1, 3), "b": draw.uniform(1, 3)}
        names = itertools.product(self.usd, self.slow, REMATS, (1, 2, 4), ("plain", "flash"))
        self.candidates = [Candidate(*one) for one in names]

    def estimate(self, one):
        state = self._measure_state(one)
        floor = 0.4 / self.speed[one.slice]
        held, seconds = int(state * self._draw.uniform(1, 3)), floor * self._draw.uniform(1, 3)
        return Estimate(one, state, state, held, LIMIT, floor, seconds, self.usd[one.slice])

    def _measure_state(self, one):
        return self.state // {"data:4": 1, "data:2,fsdp:2": 2, "fsdp:4": 4}[one.mesh]

    def examine(self, one):
        kept, work = REMATS[one.remat]
        plain = one.attention == "plain"
        held = self.activations * (kept + 2 * plain) / one.microbatches
        held += self.sums * (one.microbatches > 1)
        needs = int(self._measure_state(one) + held)
        if needs > LIMIT:
            return Verdict(False, needs, error="no", too_large=True)
        seconds = work * self.slow[one.mesh] / self.speed[one.slice]
        seconds *= (1 + 0.1 * one.microbatches) * (0.9 if plain else 1.0)
        return Verdict(True, needs, step_seconds=seconds)


def search_through(machine, goal, named=()):
    search = Search(map(machine.estimate, machine.candidates), goal, named=named)
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


@pytest.mark.parametrize(
    "goal", [Goal(3600), Goal(3600, budget=2.0), Goal(3600, deadline=2500.0)], ids=str
)
@pytest.mark.parametrize("seed", range(20))
def test_each_named_slice_gets_a_price_if_anything_fits_there(seed, goal):
    machine = Machine(seed)
    search = search_through(machine, goal, named=machine.usd)
    best = try_all(machine, goal)
    if best is not None and not best[0]:
        assert search.rank(search.list_best()[0]) == best
    priced = {one.slice for one, verdict in search.verdicts.items() if verdict.fits}
    for name in machine.usd:
        known = Machine(seed)
        known.candidates = [one for one in known.candidates if one.slice == name]
        alone = try_all(known, goal)
        if alone is not None and not alone[0]:
            assert name in priced


def test_for_the_price_of_a_named_slice_one_candidate_is_compiled_at_a_time():
    dear = [Candidate("b", mesh, "none", 1) for mesh in ("data:4", "fsdp:4")]
    estimates = [estimate_of(ONE), *(estimate_of(one, usd=99.0) for one in dear)]
    for named, chosen in (((), None), (("b",), dear[0])):
        search = Search(estimates, CHEAPEST, named=named)
        search.record_known({ONE: Verdict(True, step_seconds=1.0)})
        assert search.choose_next() == chosen and search.choose_next() is None
    assert search.left == 2
    search.record(dear[0], Verdict(False, 2 * LIMIT, too_large=True))
    assert search.choose_next() == dear[1]
    search.record(dear[1], Verdict(True, step_seconds=1.0))
    assert search.left == 0


def test_a_slice_that_nothing_fits_on_is_known_before_anything_is_compiled():
    large = Candidate("v5e-1", "", "none", 1)
    search = Search([estimate_of(ONE), estimate_of(large, held=2 * LIMIT)], CHEAPEST)
    space = types.SimpleNamespace(list_changes=lambda candidate: [])
    [known] = table.describe_ruled_out(search, space)
    assert known == f"  v5e-1: no row; left out: 1 {plan.STATE}"
    search.record_known({large: Verdict(True, 1, step_seconds=1.0)})
    assert table.describe_ruled_out(search, space) == [] and not search.pruned


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
    found = prune(both, verdicts=[(ONE, Verdict(True, step_seconds=3.0))])
    assert found == {OTHER: plan.NO_CHEAPER}
    assert prune(both, verdicts=[(ONE, Verdict(True, step_seconds=3.1))]) == {}


def test_what_fits_without_a_price_prunes_nothing():
    more = Candidate("a", "fsdp:4", "block", 1)
    both = [estimate_of(ONE), estimate_of(more)]
    assert prune(both, verdicts=[(ONE, Verdict(True))]) == {}
    assert prune(both, verdicts=[(ONE, Verdict(True, step_seconds=2.0))]) == {more: plan.SLOWER}


def test_what_recomputes_more_is_compiled_if_arithmetic_expects_it_to_be_faster():
    remats = ("products", "block", "offload")
    less = {remat: Candidate("a", "fsdp:4", remat, 1) for remat in remats}
    likely = {less["products"]: 1.5, less["block"]: 2.5, less["offload"]: 1.5}
    estimates = [Estimate(one, 1, 1, 1, LIMIT, 1.0, said, 1.0) for one, said in likely.items()]
    estimates.append(Estimate(ONE, 1, 1, 1, LIMIT, 1.0, 2.0, 1.0))
    slower = {LIMIT: ("block", "offload"), LIMIT // 5: remats}  # a small model has little traffic
    for held, names in slower.items():
        verdicts = [(ONE, Verdict(True, held, step_seconds=2.0))]
        found = prune(estimates, verdicts=verdicts)
        assert found == {less[name]: plan.SLOWER for name in names}


def test_the_number_of_microbatches_is_raised_until_the_rest_beside_the_state_can_fit():
    ladder = [Candidate("a", "fsdp:4", "none", n) for n in (1, 2, 4, 8)]
    estimates = [estimate_of(one) for one in ladder]
    # 4,100 of 1,000: beside 100 of state, 2,000 with two microbatches, 1,000 with four.
    failed = Verdict(False, 4100, error="no", too_large=True)
    found = prune(estimates, verdicts=[(ladder[0], failed)])
    assert found == dict.fromkeys(ladder[1:3], plan.NEEDS_MORE)


def test_a_single_microbatch_may_fit_where_two_with_sums_of_gradients_did_not():
    one, two, four = (Candidate("a", "fsdp:4", "offload", n) for n in (1, 2, 4))
    failed = Verdict(False, 9 * LIMIT, error="no", too_large=True)
    estimates = [estimate_of(each, state=900) for each in (one, two, four)]
    assert prune(estimates, verdicts=[(two, failed)]) == {four: plan.NEEDS_MORE}
    assert prune(estimates, verdicts=[(four, failed)]) == {two: plan.NEEDS_MORE}


def test_what_runs_is_awaited_by_those_that_need_as_much_with_its_mesh():
    runs, more = (Candidate("a", "fsdp:4", remat, 1) for remat in ("block", "products"))
    other = Candidate("b", "fsdp:4", "block", 1)
    less = Candidate("a", "fsdp:4", "offload", 1)
    others = [estimate_of(more, least=3.0), estimate_of(less, least=3.0)]
    others.append(estimate_of(other, usd=9.0))
    for likely, order in ((LIMIT, [runs, other, less, None]), (LIMIT // 2, [runs, other, None])):
        search = Search([Estimate(runs, 1, 1, likely, LIMIT, 1.0, 1.0, 1.0), *others], Goal(1))
        # What needs less memory is the answer if the one that runs does not fit.
        assert [search.choose_next() for _ in order] == order
        assert (search.running, search.left) == (len(order) - 1, 4)
    found = search.find_promising()
    assert found is not None and found.candidate == runs


def test_what_runs_is_pruned_too_and_counts_if_it_ends_all_the_same():
    fits, slower = (Candidate("a", "fsdp:4", remat, 1) for remat in ("block", "offload"))
    search = Search(
        [Estimate(fits, 1, 1, LIMIT, LIMIT, 1.0, 1.0, 1.0), estimate_of(slower, least=1.1)], Goal(1)
    )
    assert [search.choose_next(), search.choose_next()] == [fits, slower]
    search.record(fits, Verdict(True, 1, step_seconds=2.0))
    assert search.pruned == {slower: plan.SLOWER} and search.left == 0
    search.record(slower, Verdict(True, 1, step_seconds=3.0))
    assert not search.pruned and len(search.verdicts) == 2


def test_of_a_small_model_what_keeps_all_comes_first():
    block, none = (Candidate("a", "fsdp:4", remat, 1) for remat in ("block", "none"))
    for likely, first in ((LIMIT // 5, none), (LIMIT // 2, block)):
        slower = Estimate(none, 1, 1, likely, LIMIT, 1.0, 2.0, 1.0)
        assert Search([estimate_of(block), slower], CHEAPEST).choose_next() == first


def test_inputs_of_blocks_wait_on_the_host_last_unless_nothing_else_may_fit():
    block, host = (Candidate("a", "fsdp:4", remat, 1) for remat in ("block", "offload"))
    for likely, order in ((LIMIT, [block, host]), (LIMIT + 1, [host, None])):
        search = Search(
            [Estimate(block, 1, 1, likely, LIMIT, 1.0, 9.0, 1.0), estimate_of(host, least=2.0)],
            CHEAPEST,
        )
        assert [search.choose_next(), search.choose_next()] == order


def test_a_crash_says_nothing_about_other_candidates():
    more = Candidate("a", "fsdp:4", "none", 2)
    failed = Verdict(False, error="crashed")
    assert prune([estimate_of(ONE), estimate_of(more)], verdicts=[(more, failed)]) == {}


def test_known_verdicts_are_recorded_without_examining():
    search = Search([estimate_of(ONE), estimate_of(OTHER)], Goal(3600))
    known = {ONE: Verdict(True, step_seconds=3.0)}
    search.record_known({**known, Candidate("b", "", "none", 1): Verdict(False)})
    assert search.verdicts == known and search.list_best() == [ONE] and search.left == 1
    assert search.choose_next() == OTHER


@pytest.mark.parametrize(
    ("first", "alike", "other"),
    [
        (("data:4", "block"), ("data:4", "offload"), ("fsdp:4", "block")),
        (("data:4", "products"), ("fsdp:4", "products"), ("data:4", "block")),
    ],
)
def test_what_a_program_needs_beyond_its_closed_form_is_expected_of_others(first, alike, other):
    first, alike, other = (Candidate("a", *one, 1) for one in (first, alike, other))
    seconds = {first: 1.0, alike: 1.1, other: 9.0}
    search = Search([estimate_of(one, least=seconds[one]) for one in seconds], CHEAPEST)
    assert search.choose_next() == first
    search.record(first, Verdict(False, hbm_bytes=LIMIT + 500, error="no"))
    assert search.choose_next() == other
    search.record(other, Verdict(False, error="no"))
    assert search.choose_next() == alike


def test_activations_beyond_the_closed_form_shrink_with_the_microbatches():
    first, fewer, most = (Candidate("a", "data:4", "none", n) for n in (1, 2, 8))
    other = Candidate("a", "data:4", "block", 1)
    seconds = {first: 1.0, fewer: 1.1, most: 1.2, other: 9.0}
    search = Search([estimate_of(one, least=seconds[one]) for one in seconds], CHEAPEST)
    search.choose_next()
    search.record(first, Verdict(False, hbm_bytes=2 * LIMIT, error="no"))  # 1,900 above 100
    assert search.choose_next() == most


def test_what_fits_with_room_to_spare_brings_others_forward():
    first, fewer = (Candidate("a", "data:4", "products", n) for n in (2, 1))
    other = Candidate("b", "data:4", "block", 1)
    likely = {first: 900, fewer: 1800, other: 100}
    seconds = {first: 1.0, fewer: 1.0, other: 2.0}
    search = Search(
        [Estimate(one, 50, 50, likely[one], LIMIT, 1.0, seconds[one], 1.0) for one in likely],
        CHEAPEST,
    )
    assert search.choose_next() == first
    search.record(first, Verdict(True, hbm_bytes=80, step_seconds=9.0))
    assert search.choose_next() == fewer


def test_the_settings_of_the_config_are_tried_first_but_for_those_that_cannot_fit():
    own, larger = (Candidate("a", mesh, "block", 1) for mesh in ("fsdp:4", "data:4"))
    elsewhere = Candidate("b", "fsdp:4", "block", 1)
    other = Candidate("a", "tensor:4", "none", 1)
    estimates = [estimate_of(other, least=0.1), estimate_of(own), estimate_of(elsewhere, least=9.0)]
    estimates.append(Estimate(larger, 100, 100, 2 * LIMIT, LIMIT, 0.1, 0.1, 1.0))
    search = Search(estimates, CHEAPEST, [own, larger, elsewhere])
    assert search.choose_next() == own
    # On another core, before there is a verdict: on a slice for which nothing is compiled.
    assert search.choose_next() == elsewhere
    assert search.choose_next() == other


def test_once_something_fits_the_most_promising_is_next_whatever_its_slice():
    first, second = (Candidate("a", mesh, "block", 1) for mesh in ("fsdp:4", "data:4"))
    third, fourth = (Candidate("a", mesh, "block", 1) for mesh in ("tensor:4", "fsdp:2"))
    elsewhere = Candidate("b", "fsdp:4", "block", 1)
    seconds = {first: 1.0, second: 1.1, third: 1.2, fourth: 1.3, elsewhere: 1.4}
    search = Search([estimate_of(one, least=seconds[one]) for one in seconds], CHEAPEST)
    assert search.choose_next() == first
    search.record(first, Verdict(True, step_seconds=2.0))
    assert [search.choose_next(), search.choose_next()] == [second, third]


def test_plain_attention_waits_for_the_kernel_unless_it_does_not_run():
    def candidate(name, mesh, attention):
        return Candidate(name, mesh, "block", 1, attention)

    first, second = candidate("a", "data:4", "flash"), candidate("a", "fsdp:4", "flash")
    plain, elsewhere = candidate("a", "data:4", "plain"), candidate("b", "data:4", "plain")
    seconds = {plain: 0.9, first: 1.0, second: 2.0, elsewhere: 1.9}
    for fits, order in ((True, [elsewhere, second, plain]), (False, [plain, elsewhere, second])):
        search = Search([estimate_of(one, least=seconds[one]) for one in seconds], CHEAPEST)
        assert [one.candidate for one in search.list_promising()] == [first, elsewhere]
        assert search.choose_next() == first
        search.record(first, Verdict(fits, error="" if fits else "no kernel of these shapes"))
        found = []
        while (one := search.choose_next()) is not None:
            found.append(one)
            search.record(one, Verdict(False, error="no"))
        assert found == order


def test_a_verdict_is_a_line_with_the_memory_the_price_and_how_many_are_left():
    names = ("v5e-1", "v6e-1", "v5p-1")
    large, fits, left = (Candidate(name, "data:1", "none", 1) for name in names)
    search = Search(map(estimate_of, (large, fits, left)), CHEAPEST)
    search.record_known({large: Verdict(False, 17 << 30, error="no", too_large=True)})
    search.record_known({fits: Verdict(True, 3 << 30, step_seconds=2.0)})
    space = types.SimpleNamespace(format_candidate=lambda candidate: candidate.slice)
    said = [table.describe_verdict(search, space, one) for one in (large, fits)]
    assert said == [
        "v5e-1: does not fit, 17 GiB of 15.8 GiB; 1 left",
        "v6e-1: fits, 3 GiB of 31.2 GiB, 2 s per step, $2.00 a run; 1 left",
    ]
    search.goal = dataclasses.replace(CHEAPEST, tokens=1000)
    line = table.describe_verdict(search, space, fits)
    assert line.endswith("2 s per step, $2.00 a run ($555.56 per 1B tokens); 1 left")


def test_a_line_says_once_each_slice_has_a_price():
    first, second = (Candidate(name, "", "block", 1) for name in ("v5e-1", "v6e-1"))
    left = dataclasses.replace(second, remat="none")
    search = Search(map(estimate_of, (first, second, left)), CHEAPEST)
    search.record(first, Verdict(True, 1, step_seconds=2.0))
    assert not table.describe_priced(search)
    search.record(second, Verdict(True, 1, step_seconds=2.0))
    assert "Ctrl-C prints the best so far" in table.describe_priced(search)[0]
    search.record(left, Verdict(True, 1, step_seconds=2.0))
    assert not table.describe_priced(search)


def test_each_slice_without_a_price_says_what_it_may_cost_or_why_it_has_none():
    left, dear = Candidate("c", "", "none", 1), Candidate("d", "", "none", 1)
    large, larger = (Candidate("v5e-1", "", remat, 1) for remat in ("block", "none"))
    state, odd = (Candidate(name, "", "none", 1) for name in ("v6e-1", "v6e-4"))
    estimates = [estimate_of(ONE), estimate_of(left, least=0.5), estimate_of(left, least=0.5)]
    unpriced = Candidate("f", "", "none", 1)
    estimates += [estimate_of(dear, usd=99.0), estimate_of(large), estimate_of(larger)]
    estimates += [estimate_of(state, held=2 * LIMIT), estimate_of(odd), estimate_of(unpriced)]
    search = Search(estimates, Goal(7200))
    fits, fails = Verdict(True, 1, step_seconds=1.0), Verdict(False, 17 << 30, too_large=True)
    search.record_known({ONE: fits, larger: Verdict(False, 20 << 30, too_large=True)})
    search.record_known({odd: Verdict(False, error="crashed", too_large=True)})
    search.record_known({large: fails, unpriced: Verdict(True, 1)})
    search.choose_next()
    assert {name: found for name, found in search.list_unpriced().items() if found} == {
        "c": estimates[1],
        "d": {plan.NO_CHEAPER: 1},
        "v6e-1": {plan.STATE: 1},
    }
    space = types.SimpleNamespace(format_candidate=lambda one: f"{one.slice} remat={one.remat}")
    assert table.describe_unpriced(search) == [
        "  c: no price yet; roughly 1 h and $1.00 a run, at the chip's peak $1.00 a run"
    ]
    assert table.describe_ruled_out(search, space) == [
        "  d: no row; left out: 1 no cheaper than the best even at the chip's peak; at the chip's "
        "peak 2 h and $198.00 a run",
        "  v5e-1: no row; the smallest that is too large needs 17 GiB of 15.8 GiB: "
        "v5e-1 remat=block",
        f"  v6e-1: no row; left out: 1 {plan.STATE}",
        "  v6e-4: none of the compiled candidates runs",
    ]


def test_estimates_are_off_by_what_they_were_off_before_on_their_slice():
    meshes = ("fsdp:4", "data:4", "tensor:4")
    first, second, third = (Candidate("a", mesh, "none", 1) for mesh in meshes)
    elsewhere = Candidate("b", "fsdp:4", "none", 1)
    estimates = {one: estimate_of(one, least=1.0) for one in (first, second, third, elsewhere)}
    search = Search(estimates.values(), CHEAPEST)
    assert search.expect_seconds(estimates[first]) == 1.0
    search.record_known({first: Verdict(True, step_seconds=2.0)})
    assert search.expect_seconds(estimates[third]) == search.expect_seconds(estimates[elsewhere])
    assert search.expect_seconds(estimates[third]) == 2.0
    plain = estimate_of(Candidate("a", "fsdp:2", "none", 1, "plain"))
    assert search.expect_seconds(plain) == 1.0
    search.record_known({second: Verdict(True, step_seconds=4.0)})
    assert search.expect_seconds(estimates[third]) == 3.0
    search.record_known({elsewhere: Verdict(True, step_seconds=0.5)})
    assert search.expect_seconds(estimates[third]) == 3.0
    assert search.expect_seconds(estimates[elsewhere]) == 1.0  # no less than at the peak


def test_rough_estimates_begin_with_the_size_of_the_model_and_what_an_hour_costs():
    candidate = Candidate("v5p-8", "", "none", 1)
    search = Search([estimate_of(candidate, usd=16.8)], CHEAPEST)
    for changes, said in (([], ":"), (["model.remat=block"], " model.remat=block:")):
        space = types.SimpleNamespace(list_changes=lambda candidate, found=changes: found)
        head, line = table.describe_estimates(search, space, 1000)
        assert head.startswith("1,000 parameters. Looking for the cheapest, among 1 candidate.")
        assert line.startswith(f"  v5p-8 (4 chips, $16.80 an hour){said} 1 s per step, 1 h and ")
    assert table.describe_hours(search) == "v5p-8 (4 chips) $16.80 an hour"


def test_what_is_left_is_said_to_be_no_better_if_that_is_expected():
    for least, said in ((0.4, "left, roughly: b"), (0.9, "left, which is no better than the best")):
        likely = Estimate(OTHER, 100, 100, 100, LIMIT, least, 1.5 * least, 1.0)
        search = Search([estimate_of(ONE), likely], CHEAPEST)
        search.record_known({ONE: Verdict(True, step_seconds=1.0)})
        space = types.SimpleNamespace(format_candidate=lambda candidate: candidate.slice)
        [line] = table.describe_next(search, space)
        assert said in line
    slow = Estimate(OTHER, 100, 100, 100, LIMIT, 1.0, 2.0, 0.1)
    late = Search([estimate_of(ONE), slow], Goal(3600, deadline=5000.0))
    late.record_known({ONE: Verdict(True, step_seconds=1.0)})
    assert "left, which is too slow, roughly: b" in table.describe_next(late, space)[0]


def test_a_slice_that_cannot_be_cheaper_even_at_its_peak_is_said_to_be_so():
    others = [Candidate("b", mesh, "none", 1) for mesh in ("fsdp:4", "data:4")]
    search = Search([estimate_of(ONE), *(estimate_of(one, usd=3.0) for one in others)], CHEAPEST)
    known = {ONE: Verdict(True, step_seconds=2.0), others[0]: Verdict(True, step_seconds=4.0)}
    search.record_known(known)
    search.choose_next()
    assert table.describe_losers(search) == [
        "  b: its row may not be the best there, but nothing there is cheaper than the first row; "
        "at the chip's peak 1 h and $3.00 a run"
    ]


def test_the_best_of_each_slice_is_shown_and_named_where_it_may_not_be_the_best():
    meshes = ("fsdp:4", "data:4", "tensor:4")
    cheap = [Candidate("a", mesh, "none", 1) for mesh in meshes]
    dear, dearer, hopeless = (Candidate("b", mesh, "none", 1) for mesh in meshes)
    estimates = [estimate_of(one) for one in (*cheap, dear, dearer)]
    search = Search([*estimates, estimate_of(hopeless, usd=5.0)], CHEAPEST)
    seconds = {**dict.fromkeys(cheap, 2.0), dear: 3.0, dearer: 4.0}
    known = {one: Verdict(True, step_seconds=time) for one, time in seconds.items()}
    assert table.describe_losers(search) == []
    search.record_known(known)
    assert search.choose_next() is None
    space = types.SimpleNamespace(list_changes=lambda candidate: [])
    rows = table.build_rows(search, space, 2)
    assert [(row["slice"], row["step_seconds"]) for row in rows] == [
        ("a", 2.0),
        ("a", 2.0),
        ("b", 3.0),
    ]
    assert table.describe_losers(search) == [
        "  b: its row may not be the best there; at the chip's peak 1 h and $1.00 a run"
    ]
    known = {cheap[0]: Verdict(True, step_seconds=2.0), dear: Verdict(True, step_seconds=9.0)}
    slow = [estimate_of(cheap[0]), estimate_of(dear), estimate_of(dearer, least=5.0)]
    for limit, expected in ((4 * 3600.0, "b: its row "), (7200.0, "b: its row "), (36e3, "")):
        search = Search(slow, Goal(3600, deadline=limit))
        search.record_known(known)
        search.choose_next()
        assert "".join(table.describe_losers(search))[2:].startswith(expected)


def test_a_row_has_the_range_of_the_time_and_the_mfu_where_they_are_known():
    one, other = (Candidate(name, "data:1", "none", 1) for name in ("v5e-1", "v6e-1"))
    search = Search([estimate_of(one), estimate_of(other)], CHEAPEST)
    known = Verdict(True, 1 << 30, 0, 1.0, step_seconds_low=0.84, step_seconds_high=1.16, mfu=0.423)
    search.record_known({one: known, other: Verdict(True, step_seconds=2.0)})
    space = types.SimpleNamespace(list_changes=lambda candidate: [])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.build_table(table.build_rows(search, space, 2), "", 120))
    head, first, second = console.export_text().splitlines()
    assert re.search(r" step +range +MFU +time/run ", head)
    assert re.search(r" 1 GiB of 15.8 GiB +1 s  0.84-1.16 s  42% +1 h ", first)
    assert re.search(r" 2 s {14,}2 h ", second)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_settings_and_prices_are_never_cut(width):
    changes = ["model.remat=products", "train.gradient_accumulation_steps=4"]
    first = Candidate("v6e-8", "data:2,fsdp:2,tensor:2", "products", 4)
    row = {"slice": first.slice, "mesh": first.mesh, "changes": changes, "hbm_bytes": 28 << 30}
    row |= {"remat": "products"}
    row |= {"host_bytes": 4 << 30, "step_seconds": 2.05, "step_seconds_low": 1.7, "usd": 12.31}
    row |= {"step_seconds_high": 2.4, "mfu": 0.35, "hours": 0.57, "usd_per_1b_tokens": 93.95}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table.build_table([row | {"meets_goal": True}], "", width))
    text = console.export_text()
    assert all(cell in text for cell in ("v6e-8", first.mesh, "2.05 s", "$12.31", changes[0]))
    # Where nothing else is left to leave out, the words of settings are divided among lines.
    divided = "".join(line[31:64].strip() for line in text.splitlines())
    assert changes[1] in (text if width > 80 else divided)
    assert [cell in text for cell in ("$93.95", "28 GiB", "1.7-2.4 s", "35%", "34.2 min")] == [
        width > 80,
        *(4 * [width > 100]),
    ]


@pytest.mark.parametrize("width", range(36, 60, 6))
def test_what_a_very_narrow_terminal_cuts_is_marked(width):
    rows = [{"slice": "v6e-8", "changes": "model.remat=products", "step": "610 ms", "": "$1.50"}]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(build_table(rows, width, (), ("slice", "changes"), ("changes",)))
    text = console.export_text()
    assert all(cell in text for cell in ("v6e-8", "610 ms", "$1.50")) or "…" in text
    assert "model.rema" in text.replace("\n", "")


def test_what_the_config_recomputes_stands_in_brackets():
    steps = "train.gradient_accumulation_steps=2"
    for changes, remat, shown in (
        ([], "none", "(as configured)"),
        ([], "block", "(remat=block)"),
        ([steps], "block", f"{steps} (remat=block)"),
        ([steps], "none", steps),
        (["model.remat=products"], "products", "model.remat=products"),
    ):
        assert table._format_settings(changes, remat) == shown


def test_what_is_looked_for_is_said_in_words():
    assert Goal(1, budget=100.0).aim == "the fastest for at most $100.00"
    assert (Goal(1, deadline=21600.0).aim, Goal(1).aim) == (
        "the cheapest in at most 6h",
        "the cheapest",
    )


def test_rows_say_how_far_their_times_may_be_off():
    rows = [{"slice": name} for name in ("v6e-8", "v5e-1", "v5p-8", "v6e-1")]
    assert table.describe_ranges(rows) == "±16% on v6e and v5e, ±25% on v5p"
