"""Results of slices that a long check shows before its end."""

import os
import time

import pytest

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


def test_a_phase_prints_lines_after_growing_times(capsys, monkeypatch):
    phase = progress.Phase("compiling v5e-8", start=0.0)
    for seconds in (0.5, 1.2, 9.9, 10.1, 19.0, 20.2, 40.0, 79.0, 80.0, 139.0, 140.0, 400.0):
        monkeypatch.setattr(time, "monotonic", lambda now=seconds: now)
        progress._print_if_due(phase)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"compiling v5e-8, {n} s" for n in (1, 10, 20, 40, 80, 140, 400)]


@pytest.mark.parametrize(
    ("used", "seconds", "shown"),
    [
        (0.9, 1.0, ": 0% of the usual 6 min of processor time; 1 s so far"),
        (90.0, 120.0, ": 25% of the usual 6 min of processor time; 2 min so far"),
        (400.0, 500.0, ": more than the usual 6 min of processor time; 8 min so far"),
    ],
)
def test_the_share_of_the_usual_processor_time_is_shown(monkeypatch, used, seconds, shown):
    monkeypatch.setattr(progress, "read_processor_seconds", lambda _: used)
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    phase = progress.Phase("compiling v5e-8", os.getpid(), 1800.0, 360.0, start=0.0)
    assert str(phase).startswith(f"compiling v5e-8{shown}, ")


@pytest.mark.parametrize(
    ("used", "seconds", "shown"),
    [
        (100.0, 900.0, ""),  # a busy machine
        (1000.0, 500.0, ""),  # several cores
        (960.0, 1200.0, " (16 min of processor time, limit: 30 min)"),
    ],
)
def test_the_limit_is_shown_when_half_of_it_is_used(monkeypatch, used, seconds, shown):
    monkeypatch.setattr(progress, "read_processor_seconds", lambda _: used)
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    phase = progress.Phase("compiling v5e-8", os.getpid(), 1800.0, start=0.0)
    assert str(phase).startswith(f"compiling v5e-8, {seconds:.0f} s{shown}, ")


def test_the_processor_time_of_this_process_is_read():
    used = progress.read_processor_seconds(os.getpid())
    assert used == pytest.approx(time.process_time(), abs=1.0) and used > 0


def test_lines_of_a_file_have_no_carriage_return(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    with progress.Progress() as shown:
        shown.print_line("Estimate before compiling")
        time.sleep(0.1)
    assert capsys.readouterr().err == "Estimate before compiling\n"


def test_a_last_line_is_printed_but_no_estimate_of_what_is_over(capsys):
    with progress.Progress() as shown:
        shown.print_unless_over("Estimate before compiling")
        shown.print_line("v5e-8: fits")
        shown.print_at_end(["The report is in a file."])
    assert capsys.readouterr().err == "v5e-8: fits\nThe report is in a file.\n"


def test_a_report_in_a_line():
    report = SliceReport(slice="v5e-8", replicas=8, compiles=True, hbm_bytes=3 * 2**30)
    assert summarize(report) == "v5e-8: does not fit, 3 GiB needed"
    report.fits, report.step_ms = True, 835.0
    assert summarize(report) == "v5e-8: fits, 3 GiB, 835 ms per step"
    report.usd_per_1000_steps = 2.5
    assert summarize(report) == "v5e-8: fits, 3 GiB, 835 ms per step, $2.50 per 1,000"
    assert str(report) == summarize(report)
    assert summarize(SliceReport(slice="v5e-7", replicas=7, error="none")) == "v5e-7: no"
