"""Lines about what takes long."""

import time

from tftpu.runtime import slow


def test_only_what_takes_long_is_said(capsys, monkeypatch):
    monkeypatch.setattr(slow, "_SLOW", 0.05)
    with slow.reporting_if_slow("Opening the data"):
        pass
    time.sleep(0.2)
    assert not capsys.readouterr().err
    with slow.reporting_if_slow("Opening the data"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "Opening the data ...\n"
