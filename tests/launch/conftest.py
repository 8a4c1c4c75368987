"""A folder for projects of a user's own."""

import sys

import pytest


@pytest.fixture
def in_scratch_project(monkeypatch, tmp_path):
    """Runs in a scratch folder; leaves `sys.path` and no module of a project behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("mine", "model", "data", "losses"):
        sys.modules.pop(name, None)
