"""Reports that a repeated `tftpu preflight` gives again, and all that makes it check again."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import projects
from tftpu.launch.preflight import known_reports
from tftpu.launch.settings import config_flags
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport

# Prints the name under which the report of a config would be kept, in its own process.
KEY = """
import sys
from tftpu.launch.settings import config_flags
from tftpu.launch.preflight import known_reports
config, *overrides = sys.argv[1:]
experiment = config_flags.load(config, overrides)
print(known_reports.compute_key(config, experiment, ["v3-8"], {}))
"""


def key_of(config: str, *overrides: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", KEY, config, *overrides],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.medium
def test_a_config_of_tftpu_has_a_name_that_all_it_follows_from_changes(tmp_path):
    name = key_of("digits_resnet")
    assert len(name) == 32 and name == key_of("digits_resnet", cwd=tmp_path, COLUMNS="70")
    others = [
        key_of("python_gpt"),
        key_of("digits_resnet", "--config.model.width=48"),
        key_of("digits_resnet", "--config.optimizer=adam"),
        key_of("digits_resnet", XLA_FLAGS="--xla_cpu_enable_fast_math=false"),
    ]
    assert len({name, *others}) == 5 and "None" not in others


def test_slices_and_prices_are_part_of_the_name(monkeypatch):
    monkeypatch.setattr(known_reports, "_has_own_code", lambda: False)  # the tests are
    experiment = config_flags.load("digits_resnet", [])
    names = {
        known_reports.compute_key("digits_resnet", experiment, slices, prices)
        for slices in (["v3-8"], ["v5e-8"], ["v3-8", "v5e-8"])
        for prices in ({}, {"v3": 1.0})
    }
    assert len(names) == 6 and None not in names


def test_what_may_follow_from_more_than_the_config_has_none(tmp_path):
    folder = tmp_path / "project"
    config = projects.write(folder, "train=tftpu.TrainConfig(steps=3)")
    assert key_of(str(config), cwd=folder) == "None"
    assert key_of("bert_base_sst2") == "None"  # its batches are described in a file of the data


def test_a_length_in_epochs_is_read_from_the_data(monkeypatch):
    experiment = config_flags.load("digits_resnet", [])
    assert (
        known_reports.compute_key("digits_resnet", experiment, ["v3-8"], {}) is None
    )  # of a test's code
    monkeypatch.setattr(known_reports, "_has_own_code", lambda: False)
    assert known_reports.compute_key("digits_resnet", experiment, ["v3-8"], {})
    experiment.train = dataclasses.replace(experiment.train, steps=None, epochs=3)
    assert known_reports.compute_key("digits_resnet", experiment, ["v3-8"], {}) is None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path))
    return tmp_path / "preflight"


REPORT = Report(16, "float32", 3, [SliceReport("v3-8", 8, fits=True, hbm_limit_bytes=1, step_ms=2)])


def test_a_report_is_found_as_it_was_kept(cache):
    assert known_reports.find("a") is None
    known_reports.keep("a", REPORT)
    assert known_reports.find("a") == REPORT and known_reports.find("b") is None
    known_reports.keep(None, REPORT)
    assert known_reports.find(None) is None


def test_a_report_of_a_failure_is_not_kept(cache):
    failed = dataclasses.replace(REPORT, slices=[*REPORT.slices, SliceReport("v2-8", 8)])
    known_reports.keep("a", failed)
    assert known_reports.find("a") is None


def test_a_damaged_report_is_made_again(cache):
    known_reports.keep("a", REPORT)
    [file] = cache.iterdir()
    for text in (file.read_text()[:-9], "{}", "[]", ""):
        file.write_text(text)
        assert known_reports.find("a") is None


def test_tftpus_own_code_and_the_installed_packages_count_by_content(monkeypatch, tmp_path):
    module = tmp_path / "own" / "part" / "module.py"
    listed = tmp_path / "installed" / "keras-3.15.1.dist-info" / "RECORD"
    for path in (module, listed):
        path.parent.mkdir(parents=True)
        path.write_text("a = 1")
    monkeypatch.setattr(known_reports, "_list_own_folders", lambda: [f"{tmp_path}/own/"])
    monkeypatch.setattr(
        known_reports, "_list_installed_folders", lambda: [f"{tmp_path}/installed/"]
    )
    found = [known_reports.hash_code()]
    os.utime(module)
    assert known_reports.hash_code() == found[0]
    for path in (module, listed):
        path.write_text("a = 2")
        found.append(known_reports.hash_code())
    (module.parent / "new.py").write_text("")
    found.append(known_reports.hash_code())
    assert len(set(found)) == 4


@pytest.mark.slow
@pytest.mark.compiles
def test_the_command_answers_again_without_tensorflow(tmp_path):
    def run(*flags):
        command = [
            *(sys.executable, "-X", "importtime", "-c"),
            *("from tftpu.launch.main import run; run()", "preflight", "--config=digits_resnet"),
            *("--slices=v3-8", f"--workdir={tmp_path / 'run'}", *flags),
        ]
        inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        cache = {"TFTPU_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            command, env=inherited | cache, capture_output=True, text=True, check=True
        )
        return done.stdout, "tensorflow.python" in done.stderr

    first, imported = run()
    written = json.loads(Path(tmp_path, "run", "preflight.json").read_text())
    again, imported_again = run()
    assert imported and not imported_again
    assert again == first
    assert json.loads(Path(tmp_path, "run", "preflight.json").read_text()) == written
    assert run("--price=v3=9")[1]
