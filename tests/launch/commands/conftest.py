"""Runs whose files the commands show."""

import functools

import pytest

from tests.support.models.training import compiled, data, make_trainer, slowly


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Returns the workdir of a finished run of 60 steps, five of them profiled."""
    workdir = tmp_path_factory.mktemp("runs") / "fast"
    trainer = make_trainer(compiled(), workdir, log_every=10, checkpoint_every=20, profile="40:45")
    trainer.fit(data().cache().repeat(), steps=60, validation_data=data(), eval_every=30)
    return workdir


@pytest.fixture(scope="session")
def starved_run(tmp_path_factory):
    """Returns the workdir of a run with 0.1 s of input per batch, with a profile of 6 steps."""
    workdir = tmp_path_factory.mktemp("runs") / "starved"
    trainer = make_trainer(compiled(), workdir, log_every=2, profile="4:10")
    slow = data().cache().repeat().map(functools.partial(slowly, seconds=0.1))
    trainer.fit(slow, steps=12)
    return workdir
