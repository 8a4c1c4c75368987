"""Workers of other machines: none waits for another's beats, and what a lost one left is found."""

import dataclasses
import logging
import time

import pytest

from tests.support.fakes import fake_storage
from tests.support.fakes.fake_storage import BUCKET
from tests.support.searches import plan, trials_of
from tftpu.storage import buckets, owner
from tftpu.storage.owner import Owner

WORKDIR = f"gs://{BUCKET}/search"
QUICK = 30.0  # seconds; a machine without beats would be watched for 60


@pytest.fixture
def service():
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        yield service


class Far:
    """A process of another machine that holds the lock of a folder."""

    def __init__(self, folder, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "_identify_space", lambda: "another machine")
            self._owner = Owner.from_this_process(exclusive=False)
        self._uri = f"{WORKDIR}/{folder}/.lease"
        self._generation = buckets.publish(self._uri, self._owner.encode())

    def beat(self):
        self._owner = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
        self._generation = buckets.publish(self._uri, self._owner.encode(), self._generation)


def took(trials, own=()):
    """Returns the number of the trial that is taken, None for none, and the seconds."""
    began = time.monotonic()
    taken = trials.claim_next_trial(set(own))
    seconds = time.monotonic() - began
    if taken is None:
        return None, seconds
    taken.claim.close()
    return taken.trial.number, seconds


@pytest.fixture
def far(service, monkeypatch):
    """Returns the trials of a search of two, and another machine that runs the first one."""
    study, trials = trials_of(plan(trials=2), WORKDIR)
    study.sampler = plan().build_sampler(0)
    study.ask()
    return trials, Far("trials/0000/worker", monkeypatch)


def test_a_new_trial_waits_for_no_other_machine(far, caplog):
    trials, _ = far
    with caplog.at_level(logging.WARNING):
        number, seconds = took(trials)
    assert number == 1 and seconds < QUICK
    assert not caplog.records


@pytest.mark.medium
def test_a_trial_of_another_machine_is_taken_once_it_no_longer_shows_signs_of_life(
    far, monkeypatch, caplog
):
    trials, other = far
    assert took(trials)[0] == 1
    monkeypatch.setattr(owner, "EXPIRES", 0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # it lives
            other.beat()
            assert took(trials, {1})[0] is None
            time.sleep(0.6)
        assert took(trials, {1})[0] == 0
    assert not caplog.records  # nobody waited for a beat


def test_a_lock_that_another_machine_keeps_while_it_asks_is_waited_for_in_turns(
    service, monkeypatch
):
    _, trials = trials_of(plan(trials=2), WORKDIR)
    Far("asking", monkeypatch)
    number, seconds = took(trials)
    assert number is None and seconds < QUICK and not trials.over
    monkeypatch.setattr(owner, "EXPIRES", 0.2)
    time.sleep(0.3)
    assert took(trials)[0] == 0  # it was lost
