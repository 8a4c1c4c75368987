"""The price of a trial, from the report of a preflight that is not run."""

import json
import subprocess
import sys
import threading

import pytest

from tftpu.errors import UserError
from tftpu.launch.search import pricing


def price(monkeypatch, folder, **found) -> pricing.Price | None:
    """Returns the price of a trial of 500 steps whose report holds the given values."""
    item = {"undecided": False, "fits": True, "error": "", **found}
    report, start = json.dumps({"slices": [item], "steps": 500}), subprocess.Popen

    def preflight(words, **options):
        path = words[-1].removeprefix("--json=")
        code = f"open({path!r}, 'w').write({report!r})"
        return start([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", preflight)
    return pricing.price([], "v5e-8", str(folder / "log"), threading.Event())


def test_the_price_is_that_of_all_steps(monkeypatch, tmp_path):
    assert price(monkeypatch, tmp_path, usd_per_1000_steps=3.0) == pricing.Price(1.5)


def test_a_program_that_fits_but_cannot_be_read_has_no_price(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="preflight knows no price on v5e-8"):
        price(monkeypatch, tmp_path, usd_per_1000_steps=None)
