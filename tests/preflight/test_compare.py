"""Two reports side by side, and reports read from their files."""

import json
import re

import pytest
from rich.console import Console

from tests.support.written_reports import report, written
from tftpu.errors import UserError
from tftpu.preflight.compare import MAX_CHANGES, Named, print_comparison
from tftpu.preflight.report import WIDTH
from tftpu.preflight.saved import read_report
from tftpu.version import __version__


def compared(before, after, capsys):
    """Returns the lines of a comparison, with single spaces."""
    print_comparison(Named("old", before), Named("new", after), Console(width=WIDTH))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_figures_stand_side_by_side_with_their_difference(capsys):
    before = report(written(layers={"dense": 3.0, "head": 1.0}))
    after = report(written(layers={"dense": 4.5, "head": 1.0}, hbm_bytes=300 * 2**20))
    lines = compared(before, after, capsys)
    assert "before old: global batch 128, mixed_bfloat16, 1,000 steps" in lines
    assert "memory 400 MiB 300 MiB -100 MiB (-25.0%)" in lines
    assert "step 4 ms 5.5 ms +1.5 ms (+37.5%)" in lines
    assert "MFU 10.0% 7.3% -2.7 points (-27.3%)" in lines
    assert "cost/1k steps 0.4 cents 0.55 cents +0.15 cents (+37.5%)" in lines
    assert "dense 3 ms 4.5 ms +1.5 ms (+50.0%)" in lines
    assert "1 other: unchanged" in lines and not any("head" in line for line in lines)
    assert not any("verdict" in line or "1M examples" in line for line in lines)


def test_layers_that_changed_most_are_first_and_the_rest_is_added_up(capsys):
    names = [f"layer{n}" for n in range(20)]
    before = report(written(layers=dict.fromkeys(names, 1.0)))
    after = report(written(layers={name: 1.0 + 0.1 * n for n, name in enumerate(names)}))
    lines = compared(before, after, capsys)
    rows = [line.split()[0] for line in lines if line.startswith("layer")]
    assert rows == names[: -MAX_CHANGES - 1 : -1]
    # 0.1 ms times 0 + 1 + 2 + 3 + 4
    assert "5 others: +1 ms in all" in lines


def test_reports_that_are_alike_differ_nowhere(capsys):
    lines = compared(report(written()), report(written()), capsys)
    assert "step 4 ms 4 ms same" in lines
    assert "by layer: unchanged" in lines and "by kind: unchanged" in lines


def test_layers_of_one_report_only_are_marked(capsys):
    before = report(written(layers={"dense": 3.0, "old_head": 1.0}))
    after = report(written(layers={"dense": 3.0, "new_head": 2.0}))
    lines = compared(before, after, capsys)
    assert "old_head 1 ms - only before" in lines and "new_head - 2 ms only after" in lines


def test_batches_of_two_sizes_are_compared_by_the_cost_of_an_example(capsys):
    before = report(written(usd_per_1000_steps=0.128), global_batch_size=128)
    after = report(written(usd_per_1000_steps=0.128), global_batch_size=256)
    lines = compared(before, after, capsys)
    assert "cost/1k steps 12.8 cents 12.8 cents same" in lines
    assert "cost/1M examples $1.00 50 cents -50 cents (-50.0%)" in lines


def test_a_slice_that_the_step_does_not_fit_has_a_verdict_and_no_times(capsys):
    none = dict.fromkeys(("step_ms", "collective_ms", "mfu", "usd_per_1000_steps"))
    misfit = written(fits=False, by_layer=[], by_kind=[], **none, examples_per_second=None)
    lines = compared(report(misfit), report(written()), capsys)
    assert "verdict does not fit fits" in lines
    assert "step - 4 ms" in lines


def test_slices_of_one_report_only_are_named_and_none_in_common_is_an_error(capsys):
    v3, v5e = written("v3-8"), written("v5e-8")
    lines = compared(report(v3, v5e), report(v3), capsys)
    assert "Only in old: v5e-8." in lines
    with pytest.raises(UserError, match=r"no slice in common: old has v5e-8, and new has v3-8"):
        compared(report(v5e), report(v3), capsys)


def test_a_report_is_read_as_it_was_written(tmp_path):
    wanted = report(written(), written("v5e-8", error="two\nlines", plots=None))
    (tmp_path / "r.json").write_text(wanted.to_json())
    assert read_report(str(tmp_path / "r.json")) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("slices"), "is not a report"),
        (lambda r: r.update(version="0.1.0"), f"by tftpu 0.1.0, but this is {__version__}"),
        (lambda r: r.pop("version"), "by an earlier version of tftpu"),
        (lambda r: r.pop("steps"), "does not have 'steps'"),
        (lambda r: r.update(colour=1), "has an unknown 'colour'"),
        (lambda r: r["slices"][0].update(step_ms="fast"), "slices[0].step_ms cannot be 'fast'"),
        (lambda r: r["slices"][0].update(step_ms=-1.0), "slices[0].step_ms cannot be -1.0"),
        (lambda r: r["slices"][0].update(step_ms=float("nan")), "slices[0].step_ms cannot be nan"),
        (lambda r: r["slices"][0].update(flops=10**400), "slices[0].flops cannot be 1000"),
        (lambda r: r["slices"][0].update(hbm_limit_bytes=0), "v3-8 has no memory"),
        (lambda r: r.update(global_batch_size=0), "the report has no examples"),
        (lambda r: r["slices"][0].update(fits=1), "slices[0].fits cannot be '1'"),
        (lambda r: r["slices"][0].update(slice="v9-8"), "v9"),
        (lambda r: r["slices"][0]["plots"].update(memory=[]), "plots.memory cannot be '[]'"),
        (lambda r: r.update(slices={}), "slices cannot be '{}'"),
    ],
)
def test_what_is_no_report_of_this_version_fails_with_a_clear_error(change, message, tmp_path):
    record = json.loads(report(written()).to_json())
    change(record)
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=re.escape(message)):
        read_report(str(tmp_path / "r.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"slices": [{"\\ud800": 1}]}']
)
def test_a_damaged_file_is_not_a_report(content, tmp_path):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(UserError, match=r"is not a report of tftpu preflight"):
        read_report(str(tmp_path / "r.json"))
    with pytest.raises(UserError, match=r"There is no report .*/none.json"):
        read_report(str(tmp_path / "none.json"))
