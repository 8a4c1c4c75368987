"""A folder for projects of a user's own, and simulated machines for `tftpu doctor`."""

import sys

import pytest

from tests.support.fakes.scratch_machine import V5E, Scratch


@pytest.fixture
def in_scratch_project(monkeypatch, tmp_path):
    """Runs in a scratch folder; leaves `sys.path` and no module of a project behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("mine", "model", "data", "losses"):
        sys.modules.pop(name, None)


@pytest.fixture
def scratch(tmp_path) -> Scratch:
    return Scratch(tmp_path)


@pytest.fixture
def tpu_vm(scratch) -> Scratch:
    """Creates a v5e TPU VM without problems."""
    scratch.install("tensorflow-tpu", "2.20.0")
    scratch.install("libtpu", "0.0.14")
    scratch.write(V5E)
    return scratch


@pytest.fixture
def laptop(scratch) -> Scratch:
    """Creates a machine without a TPU and without problems."""
    scratch.install("tensorflow-cpu", "2.20.0")
    return scratch
