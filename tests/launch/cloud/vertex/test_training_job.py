"""`tftpu launch vertex`: the printed request fits the service's own message types."""

import os
import subprocess
import sys

import pytest
import yaml
from google.cloud import aiplatform_v1
from google.protobuf import json_format

from tests.support.fakes.rented_machine import RentedMachine
from tests.support.messages import check_message
from tftpu.launch import main
from tftpu.launch.cloud import job
from tftpu.launch.cloud.shipping import shipment


def launch(capsys, *flags: str) -> str:
    """Returns the standard output of `tftpu launch vertex`, which must succeed."""
    code = main.main(["launch", "vertex", *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys, *flags: str) -> str:
    """Returns the error of `tftpu launch vertex`: a line, and perhaps one to type."""
    assert main.main(["launch", "vertex", *flags]) == 2
    error = capsys.readouterr().err
    check_message(error, "tftpu: ")
    return error


FLAGS = ("--config=digits_resnet", "--slice=v5e-4", "--dry_run", "--workdir=gs://b/run")


def test_the_printed_yaml_is_a_custom_job_spec(capsys):
    text = launch(
        capsys,
        *FLAGS,
        "--config.train.steps=5",
        "--project=p",
        "--image=eu.gcr.io/p/i:1",
        "--service_account=sa@p.iam.gserviceaccount.com",
        "--timeout=90m",
        "--spot",
    )
    spec = json_format.ParseDict(
        yaml.safe_load(text), aiplatform_v1.CustomJobSpec.pb(aiplatform_v1.CustomJobSpec())
    )
    (pool,) = spec.worker_pool_specs
    assert pool.machine_spec.machine_type == "ct5lp-hightpu-4t"
    assert pool.machine_spec.tpu_topology == "2x2"
    assert pool.machine_spec.accelerator_count == 0
    assert pool.replica_count == 1
    assert pool.container_spec.image_uri == "eu.gcr.io/p/i:1"
    assert not pool.container_spec.args
    bash, _, script = pool.container_spec.command
    assert bash == "bash"
    assert (
        "arguments=(train --config=digits_resnet --config.train.steps=5 --workdir=gs://b/run "
        "--tpu=local)\n"
    ) in script
    assert spec.scheduling.timeout.seconds == 5400
    assert spec.scheduling.restart_job_on_worker_restart
    assert spec.scheduling.strategy == aiplatform_v1.Scheduling.Strategy.SPOT
    assert spec.base_output_directory.output_uri_prefix == "gs://b/run"
    assert spec.service_account == "sa@p.iam.gserviceaccount.com"


def test_the_first_line_is_the_command_that_takes_the_yaml(capsys):
    first = launch(capsys, *FLAGS, "--project=p", "--labels=team=vision").splitlines()[0]
    assert first.startswith("# gcloud ai custom-jobs create --config=FILE --project=p ")
    assert "--display-name=digits-resnet-" in first
    assert "config=digits-resnet,slice=v5e-4,team=vision" in first


JAX = "--config.cluster.engine=jax"
# The service's documentation has a table of them: one pool with one replica is a whole slice.
MACHINES = [
    ("v2-8", "cloud-tpu", ""),
    ("v3-8", "cloud-tpu", ""),
    ("v5e-1", "ct5lp-hightpu-1t", "1x1"),
    ("v5e-4", "ct5lp-hightpu-4t", "2x2"),
    ("v5e-8", "ct5lp-hightpu-8t", "2x4"),
    ("v5e-16", "ct5lp-hightpu-4t", "4x4"),
    ("v5e-32", "ct5lp-hightpu-4t", "4x8"),
    ("v5e-256", "ct5lp-hightpu-4t", "16x16"),
    ("v6e-1", "ct6e-standard-1t", "1x1"),
    ("v6e-8", "ct6e-standard-8t", "2x4"),
    ("v6e-16", "ct6e-standard-4t", "4x4"),
    ("v6e-256", "ct6e-standard-4t", "16x16"),
]


@pytest.mark.parametrize(("name", "machine", "topology"), MACHINES)
def test_the_machines_of_every_slice(capsys, name, machine, topology):
    engine = "tensorflow" if machine == "cloud-tpu" else "jax"
    flags = [f"--config.cluster.engine={engine}", "--config.data.global_batch_size=4096"]
    text = launch(capsys, *FLAGS, f"--slice={name}", *flags)
    spec = json_format.ParseDict(
        yaml.safe_load(text), aiplatform_v1.CustomJobSpec.pb(aiplatform_v1.CustomJobSpec())
    )
    (pool,) = spec.worker_pool_specs
    assert pool.machine_spec.machine_type == machine
    assert pool.machine_spec.tpu_topology == topology
    assert pool.machine_spec.accelerator_count == (0 if topology else 8)
    assert pool.replica_count == 1
    assert spec.scheduling.restart_job_on_worker_restart  # all machines, when one is lost


def test_a_job_of_the_jax_engine_installs_it_beside_the_tensorflow_of_the_image(capsys):
    text = launch(capsys, *FLAGS, "--slice=v6e-8", JAX)
    script = yaml.safe_load(text)["workerPoolSpecs"][0]["containerSpec"]["command"][2]
    assert "\nunset TFTPU_VENV\n" in script
    assert "\nextras=jax-tpu" in script
    assert "jax[tpu]<0.11,>=0.10" in text
    assert "tensorflow-tpu" not in text.partition("workerPoolSpecs")[0]
    assert "unset TFTPU_VENV" not in launch(capsys, *FLAGS)


def test_it_needs_no_network_credentials_or_sdk():
    # An interpreter in which the SDK cannot be imported and every connection fails.
    program = """
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
for name in ("google.cloud.aiplatform", "google.cloud.aiplatform_v1", "google.auth", "grpc"):
    sys.modules[name] = None
from tftpu.launch import main
code = main.main(["launch", "vertex", "--config=digits_resnet", "--slice=v3-8", "--dry_run"])
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
sys.exit(code)
"""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "TPU_V3" in done.stdout


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--slice=v6e-4", "for v6e-4, add --config.cluster.engine=jax"),
        ("--slice=v5e-8", "for v5e-8, add --config.cluster.engine=jax"),
        ("--slice=tpu7x-8", "v5e or v6e. `tftpu launch gke --slice=tpu7x-8` trains on it."),
        ("--slice=v4-8", "v4-8 is not a slice for custom jobs of Vertex AI"),
        ("--slice=2xv5e-8", "has one slice, but 2xv5e-8 are 2"),
        ("--slice=v3-32", "`tftpu launch tpu-vm --slice=v3-32` rents it"),
        ("--slice=v5e-16", "v5e-16 has 4 hosts, but the TensorFlow engine uses one"),
        ("--slice=tpu", "'tpu' is not a TPU slice"),
        ("--config.cluster.mesh=fsdp:8", "The mesh 'fsdp:8' needs 8 devices, but there are 4"),
        ("--workdir=runs/mine", "write gs://BUCKET/FOLDER"),
        ("--workdir=gs:///mine", "or gs://BUCKET/FOLDER"),
        ("--timeout=2 weeks", "a time such as 30s, 5m, 2h or 7d"),
        ("--timeout=0h", "7d of 1m or more"),
        ("--labels=Team=vision", "lower-case"),
        ("--labels=team=Vision", "lower-case"),
        ("--labels=slice=v3", "tftpu itself sets the label 'slice'"),
        ("--tensorboard=projects/p/locations/l/tensorboards/1", "needs --service_account="),
        ("--config.data.global_batch_size=144", "4 replicas"),
        ("--sice=v3-8", "Did you mean '--slice'?"),
    ],
)
def test_a_mistake_fails_with_one_clear_line(capsys, flag, sentence):
    name = flag.partition("=")[0]
    others = [other for other in FLAGS if not other.startswith(f"{name}=")]
    assert sentence in refused(capsys, *others, flag)


def test_tensorboard_reads_the_folder_that_the_run_writes(capsys):
    name = "projects/p/locations/us-central1/tensorboards/123"
    spec = yaml.safe_load(launch(capsys, *FLAGS, f"--tensorboard={name}", "--service_account=s@p"))
    assert spec["tensorboard"] == name
    base = spec["baseOutputDirectory"]["outputUriPrefix"]
    # AIP_TENSORBOARD_LOG_DIR, as the service defines it.
    assert f"--workdir={base}/logs" in spec["workerPoolSpecs"][0]["containerSpec"]["command"][2]


HOSTILE = "it's; touch owned; $(touch owned) `touch owned` \"&| \n"


def test_a_users_own_config_is_received_and_trained(tmp_path):
    machine = RentedMachine(tmp_path)
    own = tmp_path / "of $(touch owned)" / "Mine & $(touch owned).py"
    own.parent.mkdir()
    own.write_text("# é\n")
    sent = shipment.pack(str(own), f"tftpu {HOSTILE}")
    machine.put(sent.resolve_address("gs://b/run"), sent.files)
    overrides = [f"--config.data.name={HOSTILE}"]
    said = machine.run(
        job.build_container_command(sent, "gs://b/run", overrides), TFTPU_GCS=str(machine.bucket)
    )
    assert (machine.code, said) == (0, "trained\n")
    assert machine.arguments() == ["train", f"--config={own.name}", *overrides]
    assert (machine.home / "code" / own.parent.name / own.name).read_text() == own.read_text()
    assert f"tftpu {HOSTILE}" in "\n".join(machine.installed())
    assert not list(tmp_path.rglob("owned"))


def test_an_image_may_bring_the_environment_to_install_into(tmp_path):
    machine = RentedMachine(tmp_path)
    sent = shipment.pack("digits_resnet", None)
    machine.put(sent.resolve_address("gs://b/run"), sent.files)
    machine.tool("python", "", tmp_path / "own" / "bin")
    machine.tool("tftpu", "echo the image trains; exit 75", tmp_path / "own" / "bin")
    said = machine.run(
        job.build_container_command(sent, "gs://b/run", []),
        TFTPU_GCS=str(machine.bucket),
        TFTPU_VENV=str(tmp_path / "own"),
    )
    assert (machine.code, said) == (75, "the image trains\n")
    assert machine.installed() == ["--version", machine.installed()[-1]]  # nothing but the wheel
    assert "/tftpu-" in machine.installed()[-1]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("digits_resnet", "digits-resnet"),
        ("a/b/My Config.py", "my-config"),
        ("50.py", "run-50"),
        ("$(x).py", "x"),
        ("___.py", "run"),
    ],
)
def test_a_config_gives_a_name_that_google_cloud_allows(config, name):
    assert job.to_resource_name(config) == name
