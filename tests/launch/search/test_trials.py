"""The trials of a study: their claims, their draws, the budget, and runs that are priced."""

import re

import pytest

from tests.support.searches import TINY, plan, started, table, trials_of
from tftpu.launch.search.plan import SAMPLERS


def drawn(one, workdir, machines):
    """Returns what all trials draw; machines take them in turn, each in its own study object."""
    places = [trials_of(one, workdir) for _ in range(machines)]
    found = []
    for number in range(one.trials):
        study, trials = places[number % machines]
        taken = trials.claim_next_trial(set())
        study.tell(taken.trial, 1 / (1 + number))
        taken.claim.close()
        found.append(taken.words)
    return found


@pytest.mark.medium
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_machines_that_share_a_search_draw_what_one_alone_does(sampler, tmp_path):
    """No draw is made twice, as it would be by samplers with the same seed."""
    one = plan(sampler=sampler)
    alone = drawn(one, tmp_path / "alone", 1)
    assert drawn(one, tmp_path / "shared", 3) == alone
    assert len({tuple(words) for words in alone}) == 12
    assert drawn(plan(sampler=sampler, seed=1), tmp_path / "other", 1) != alone


def test_a_trial_whose_worker_is_gone_is_taken_and_one_that_is_held_is_not(tmp_path):
    _, trials = trials_of(plan(), tmp_path)
    first = trials.claim_next_trial(set())
    assert first.trial.number == 0
    # Claims of one process do not exclude it: `own` does.
    assert trials.claim_next_trial({0}).trial.number == 1
    first.claim.close()
    again = trials.claim_next_trial(set())
    assert (again.trial.number, again.words) == (0, first.words)


def test_a_trial_that_was_interrupted_while_it_drew_draws_the_same(tmp_path):
    whole = trials_of(plan(), tmp_path / "whole")[1].claim_next_trial(set())
    study, trials = trials_of(plan(), tmp_path / "cut")
    study.sampler = plan().build_sampler(0)
    asked = study.ask()  # a worker that ends here has told nobody what it draws
    asked.suggest_float("optimizer.learning_rate", 1e-4, 1, log=True)
    taken = trials.claim_next_trial(set())
    assert taken.trial.number == 0
    assert taken.words[0] == whole.words[0]
    assert [word.split("=")[0] for word in taken.words] == [
        word.split("=")[0] for word in whole.words
    ]


def test_the_budget_ends_a_search_until_it_is_raised(tmp_path):
    study, trials = trials_of(plan(slice="v5e-8", budget_usd=1.0), tmp_path)
    first, second = trials.claim_next_trial(set()), trials.claim_next_trial({0})
    assert trials.reserve_budget(first.trial, 0.6) and not trials.over
    assert trials.reserve_budget(first.trial, 0.6)  # asked again, it is booked once
    assert not trials.reserve_budget(second.trial, 0.6)
    assert trials.claim_next_trial({0, 1}) is None and not trials.over  # the first one is paid for
    second.claim.close()
    assert trials.claim_next_trial({0}) is None  # that it was begun makes the second one no cheaper
    first.claim.close()  # its worker is gone
    first = trials.claim_next_trial(set())
    assert first.trial.number == 0 and first.frozen.user_attrs["usd"] == 0.6
    study.tell(first.trial, 0.5)
    first.claim.close()
    assert trials.over and trials.claim_next_trial(set()) is None
    _, richer = trials_of(plan(slice="v5e-8", budget_usd=2.0), tmp_path)
    again = richer.claim_next_trial(set())
    assert not richer.over and again.trial.number == 1
    assert richer.reserve_budget(again.trial, 0.6)


@pytest.mark.slow
@pytest.mark.compiles
def test_trials_are_priced_and_those_that_do_not_fit_do_not_run(tmp_path):
    """Each device of a v5e-8 has three examples of a batch of 24: fewer than a norm's group."""
    sizes = "--space=data.global_batch_size=choice:128,24"
    words = [word for word in TINY if "global_batch_size" not in word and "--space" not in word]
    process = started(*words, sizes, "--slice=v5e-8", "--trials=6", f"--workdir={tmp_path}")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    found = {tuple(trial["overrides"]): trial for trial in table(str(tmp_path))}
    fits = found[("--config.data.global_batch_size=128",)]
    misfit = found[("--config.data.global_batch_size=24",)]
    assert fits["value"] is not None and misfit["value"] is None and not misfit["reports"]
    assert "it does not run on v5e-8: " in output and "the same as trial" in output
    assert re.search(r"cents? on v5e-8, as preflight predicts", output)
    runs = [path.parent.parent.name for path in tmp_path.glob("trials/*/run/metrics.jsonl")]
    assert len(runs) == 1  # a draw that was drawn before does not run again
