"""`tftpu preflight --report`, `--compare` and `--html`."""

import json
import subprocess
import sys

import pytest

from tests.support.written_reports import report, written
from tftpu.launch import main as command_line
from tftpu.launch.preflight import reports


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Writes runs/before and runs/after in a scratch folder."""
    monkeypatch.chdir(tmp_path)
    layers = {"before": {"dense": 3.0}, "after": {"dense": 5.0}}
    for name, spent in layers.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        text = report(written(layers=spent), written("v5e-8")).to_json()
        (tmp_path / "runs" / name / "preflight.json").write_text(text)
    return tmp_path


def test_two_reports_are_compared_and_drawn_without_tensorflow(saved):
    code = (
        "import sys; from tftpu.launch.main import main; code = main(sys.argv[1:]); "
        "print('loaded', {'tensorflow', 'keras', 'jax'} & {*sys.modules}); sys.exit(code)"
    )
    flags = ["--report=runs/after", "--compare=runs/before/preflight.json", "--html=page.html"]
    done = subprocess.run(
        [sys.executable, "-c", code, "preflight", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "before runs/before/preflight.json: global batch 128, mixed_bfloat16, 1,000 steps" in (
        lines
    )
    assert "dense 3 ms 5 ms +2 ms (+66.7%)" in lines
    assert lines[-1] == "loaded set()"
    page = (saved / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "v5e-8" in page and "peak 400 MiB" in page
    written_here = {path.name for path in saved.rglob("*") if path.is_file()}
    assert written_here == {"preflight.json", "page.html"}


def test_a_report_is_shown_again(saved, capsys):
    assert command_line.main(["preflight", "--report=runs/after", "--json=copy.json"]) == 0
    assert "v3-8" in capsys.readouterr().out
    assert (saved / "copy.json").read_text() == (saved / "runs/after/preflight.json").read_text()


GPT = ("preflight", "--config=python_gpt", "--slices=v3-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["preflight"], "or --report=FILE"),
        (["preflight", "--report=runs/none"], "there is no report runs/none/preflight.json"),
        (["preflight", "--report=none.json"], "there is no report none.json"),
        (["preflight", "--report=bad.json"], "bad.json is not a report"),
        (["preflight", "--report=old.json"], "written by an earlier version of tftpu"),
        (["preflight", "--report=runs/after", "--price=v3=1"], "leave out --price"),
        (["preflight", "--report=runs/after", "--config=python_gpt"], "leave out --config"),
        (
            ["preflight", "--report=runs/after", "--config.train.steps=5"],
            "leave out --config.train.steps=5",
        ),
        (["preflight", "--report=runs/after", "--compare=other.json"], "no slice in common"),
        ([*GPT, "--compare=python_gtp"], "Did you mean 'python_gpt'?"),
        ([*GPT, "--compare=runs/non"], "there is no report runs/non/preflight.json"),
        ([*GPT, "--compare=old.json"], "written by an earlier version of tftpu"),
        ([*GPT, "--compare=none.py"], "There is no config file 'none.py'"),
        (
            ["preflight", "--config=python_gtp", "--compare=python_gpt"],
            "There is no config 'python_gtp'",
        ),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_clear_message_and_exit_code_2(arguments, message, saved, capsys):
    (saved / "bad.json").write_text("{")
    (saved / "old.json").write_text(json.dumps({"slices": [], "global_batch_size": 8}))
    (saved / "other.json").write_text(report(written("v6e-8")).to_json())
    assert command_line.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.compiles
def test_a_config_is_compared_with_another_as_it_is(saved, capsys):
    changed = ["--config.model.layers=2", "--workdir=runs/two", "--html=two.html"]
    assert command_line.main([*GPT, *changed, "--compare=python_gpt"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("before python_gpt: global batch 32")
    assert lines[1].startswith("after python_gpt --config.model.layers=2: global batch 32")
    assert any(line.startswith("block4_attention") and "only before" in line for line in lines)
    # The other report stays where it was: only the config's own is written.
    found = json.loads((saved / "runs/two/preflight.json").read_text())
    assert "block2_attention" in str(found) and "block4_attention" not in str(found)
    assert "block2_attention" in (saved / "two.html").read_text()
    assert not (saved / "runs/python_gpt").exists()


def test_a_slice_whose_name_cannot_be_printed_is_none(tmp_path):
    known = {"step_ms": 1.5, "replicas": 8, "examples_per_second": 100.0}
    slices = [{"slice": name, **known} for name in ("\ud800", "v3-8", "a\nb")]
    (tmp_path / "preflight.json").write_text(json.dumps({"slices": slices}))
    assert reports.read_rates(str(tmp_path)) == {"v3-8": 100.0}
    assert reports.read_step_times(str(tmp_path), 8) == "v3-8: 1.5 ms"
