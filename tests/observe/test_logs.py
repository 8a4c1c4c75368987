"""Warnings on the command line."""

import warnings

import tftpu
from tftpu.observe import logs


def test_warnings_of_tftpu_have_the_format_of_its_messages(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restores it
    logs.set_up()
    message = UserWarning("The layer normalizes.")
    said = warnings.formatwarning(message, UserWarning, tftpu.__file__, 1)
    assert said == "tftpu: warning: The layer normalizes.\n"
    said = warnings.formatwarning(message, UserWarning, "/elsewhere/own.py", 1)
    assert said.startswith("/elsewhere/own.py:1: UserWarning: The layer normalizes.")
