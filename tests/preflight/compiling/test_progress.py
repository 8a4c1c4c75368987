"""Results of slices that a long check shows before its end."""

import time

from tftpu.preflight.compiling import progress
from tftpu.preflight.slice_report import SliceReport, summarize


def test_results_of_a_long_check_are_printed_as_they_come(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LONG", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    with progress.Progress() as shown:
        shown.print_result("v5e-8: does not fit")
        time.sleep(0.2)
        assert "v5e-8: does not fit\n" in capsys.readouterr().err


def test_results_of_a_short_check_are_in_its_table_alone(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    with progress.Progress() as shown:
        shown.print_result("v5e-8: does not fit")
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_report_in_a_line():
    report = SliceReport(slice="v5e-8", replicas=8, compiles=True, hbm_bytes=3 * 2**30)
    assert summarize(report) == "v5e-8: does not fit, 3 GiB needed"
    report.fits, report.step_ms = True, 835.0
    assert summarize(report) == "v5e-8: fits, 3 GiB, 835 ms per step"
    assert summarize(SliceReport(slice="v5e-7", replicas=7, error="none")) == "v5e-7: no"
