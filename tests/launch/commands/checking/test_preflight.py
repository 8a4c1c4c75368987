"""`tftpu preflight`: errors, files, prices, and the prediction that `tftpu train` shows."""

import json

import pytest

from tftpu.errors import UserError
from tftpu.launch import main as command_line
from tftpu.launch.preflight import reports
from tftpu.launch.preflight.check import parse_prices

DIGITS = ("preflight", "--config=digits_resnet")


def test_a_slice_that_cannot_share_the_batch_is_reported_with_the_reason(tmp_path, capsys):
    arguments = [*DIGITS, "--slices=v3-32", f"--workdir={tmp_path}"]
    assert command_line.main(arguments) == 2
    said = capsys.readouterr()
    assert "does not compile" in said.out
    assert "norm_batch=16 does not divide the 4 examples" in said.out
    assert "This step does not run on v3-32: see above." in said.err


@pytest.mark.slow
@pytest.mark.compiles
def test_the_report_is_written_to_the_workdir_and_to_the_json_file(tmp_path, capsys):
    wanted = tmp_path / "report.json"
    arguments = [
        *(*DIGITS, "--slices=v3-8", "--price=v3=4.00", "--explain"),
        *(f"--workdir={tmp_path / 'run'}", f"--json={wanted}"),
    ]
    assert command_line.main(arguments) == 0
    said = capsys.readouterr().out
    assert "cycles" in said and "by layer" in said and "stage1_block1_conv1_conv" in said
    report = json.loads(wanted.read_text())
    assert report == json.loads((tmp_path / "run" / "preflight.json").read_text())
    (item,) = report["slices"]
    assert item["usd_per_1000_steps"] == pytest.approx(4 * 4.00 * item["step_ms"] / 3600)
    # The command `train` shows this next to its own time if it has as many replicas.
    shown = f"v3-8: {1e3 * item['step_ms']:.3g} us"
    assert reports.read_step_times(str(tmp_path / "run"), 8) == shown
    assert reports.read_step_times(str(tmp_path / "run"), 4) == ""


def test_prices_can_be_given():
    assert parse_prices("v5e=1.10,v3=0.5") == {"v5e": 1.10, "v3": 0.5}
    assert parse_prices("") == {}


@pytest.mark.parametrize("text", ["v5e", "v5e=cheap", "v5e=-1", "v9=1", "v5e=nan"])
def test_an_invalid_price_fails_with_a_clear_error(text):
    with pytest.raises(UserError, match="--price"):
        parse_prices(text)


def test_there_is_no_prediction_without_a_preflight(tmp_path):
    assert reports.read_step_times(str(tmp_path), 8) == ""


@pytest.mark.slow
def test_train_shows_the_prediction_next_to_the_measured_step(tmp_path, capsys):
    items = [
        {"slice": "v5e-1", "step_ms": 12.34, "replicas": 1},
        {"slice": "v3-8", "step_ms": 99.0, "replicas": 8},
        {"slice": "v2-8", "step_ms": None, "replicas": 1},
    ]
    (tmp_path / "preflight.json").write_text(json.dumps({"slices": items}))
    arguments = ["train", "--config=digits_resnet", f"--workdir={tmp_path}"]
    assert command_line.main([*arguments, "--config.train.steps=80"]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "preflight predicted" in row]
    assert "v5e-1: 12.3 ms" in line and "v3-8" not in line and "v2-8" not in line


@pytest.mark.slow
@pytest.mark.compiles
def test_text_that_the_model_writes_is_priced(capsys, tmp_path):
    path = tmp_path / "text.json"
    words = ["preflight", "--config=python_gpt", "--slices=v5e-1", "--generate=2", f"--json={path}"]
    assert command_line.main(words) == 0
    [found] = json.loads(path.read_text())
    assert found["tokens_per_second"] == pytest.approx(2e3 / found["token_ms"])
    assert "1M tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=digits_resnet", "--generate=1"], "cannot write texts with the model"),
        (["--config=python_gpt", "--generate=0"], "--generate"),
        (["--config=python_gpt", "--generate=1", "--explain"], "--explain is about a train step"),
    ],
)
def test_text_that_cannot_be_priced_is_refused(capsys, words, message):
    assert command_line.main(["preflight", *words]) == 2
    assert message in capsys.readouterr().err
