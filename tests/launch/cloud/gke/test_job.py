"""`tftpu launch gke`: the JobSet, and the command of its pods."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest
import yaml
from kubernetes import client

from tests.support.fakes.fake_google_cloud import metadata_server, storage
from tests.support.fakes.rented_machine import RentedMachine
from tests.support.messages import check_message
from tftpu.launch import main
from tftpu.launch.cloud import job
from tftpu.launch.cloud.gke import pods as gke_pods
from tftpu.launch.cloud.gke.pods import Pod
from tftpu.launch.cloud.shipping import shipment

JAX = "--config.cluster.engine=jax"
FLAGS = (
    *(
        "--config=digits_resnet",
        "--config.data.global_batch_size=4096",
        JAX,
        "--namespace=research",
    ),
    *("--slice=v5e-16", "--workdir=gs://b/run"),
)


def test_the_batch_is_shared_along_the_axes_that_share_it(capsys):
    mesh = "--config.cluster.mesh=fsdp:4,sequence:4"
    found = dry_run(capsys, mesh, "--config.data.global_batch_size=64")
    assert found["kind"] == "JobSet"
    flags = ["--dry_run", mesh, "--config.data.global_batch_size=66"]
    assert main.main(["launch", "gke", *FLAGS, *flags]) == 2
    assert "cannot be divided among 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--labels=team=-x", "the value '-x' must have"),
        ("--labels=team_=x", "'team_=x' is not key=value"),
        ("--queue_timeout=foo", "--queue_timeout=foo: the value must be a time"),
    ],
)
def test_a_dry_run_refuses_what_kubernetes_would(capsys, flag, message):
    assert main.main(["launch", "gke", *FLAGS, "--dry_run", flag]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([(69, ""), (69, ""), (137, "OOMKilled")], 2),
        ([(69, ""), (137, ""), (1, "Error")], 2),
        ([(75, ""), (69, "")], 0),
        ([(137, "OOMKilled"), (1, "Error")], 0),
    ],
)
def test_the_pod_that_failed_by_itself_is_the_cause(ends, cause):
    pods = [Pod(f"p{i}", i, True, "", code, word) for i, (code, word) in enumerate(ends)]
    assert gke_pods.find_cause(pods).index == cause


def dry_run(capsys, *flags: str) -> dict:
    """Returns the JobSet that a dry run prints."""
    code = main.main(["launch", "gke", *FLAGS, "--dry_run", *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out.startswith("# kubectl apply --filename=FILE\n")
    return yaml.safe_load(captured.out)


def pod_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_printed_jobset_field_by_field(capsys):
    flags = ("--spot", "--service_account=trainer", "--labels=team=vision", "--restarts=3")
    printed = dry_run(capsys, *flags, "--timeout=2h", "--image=eu.gcr.io/p/i:1")
    assert (printed["apiVersion"], printed["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name = printed["metadata"]["name"]
    assert name.startswith("digits-resnet-")
    assert printed["metadata"]["namespace"] == "research"
    assert printed["metadata"]["labels"]["slice"] == "v5e-16"
    assert printed["metadata"]["labels"]["team"] == "vision"
    assert printed["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    spec = printed["spec"]
    assert spec["network"] == {
        "enableDNSHostnames": True,
        "subdomain": name,
        "publishNotReadyAddresses": True,
    }
    assert spec["failurePolicy"]["maxRestarts"] == 3
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy", "DeadlineExceeded"]
    assert spec["ttlSecondsAfterFinished"] == 86400
    [replicated] = spec["replicatedJobs"]
    assert replicated["replicas"] == 1
    template = replicated["template"]["spec"]
    assert (template["parallelism"], template["completions"], template["backoffLimit"]) == (4, 4, 0)
    assert template["completionMode"] == "Indexed"
    assert template["activeDeadlineSeconds"] == 7200
    [policy] = template["podFailurePolicy"]["rules"]
    assert (policy["action"], policy["onExitCodes"]["values"]) == ("FailJob", [2])
    pod = pod_of(printed)
    assert pod["restartPolicy"] == "Never"
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    [toleration] = pod["tolerations"]
    assert (toleration["key"], toleration["value"]) == ("cloud.google.com/gke-spot", "true")
    [container] = pod["containers"]
    assert container["image"] == "eu.gcr.io/p/i:1"
    tpus = {"google.com/tpu": "4"}
    assert container["resources"]["limits"] == tpus
    assert container["resources"]["requests"] == {**tpus, "ephemeral-storage": "10Gi"}
    bash, _, script = container["command"]
    assert bash == "bash"
    assert f"{JAX} --workdir=gs://b/run --tpu=local)\n" in script
    assert "\nextras=jax-tpu" in script


def test_without_spot_and_with_one_host_nothing_is_asked_for_in_vain(capsys):
    printed = dry_run(capsys, "--slice=v5e-8")
    assert "annotations" not in printed["metadata"]
    assert "tolerations" not in pod_of(printed)
    assert "serviceAccountName" not in pod_of(printed)


@pytest.mark.parametrize(
    ("name", "accelerator", "topology", "hosts", "chips"),
    [
        ("v4-16", "tpu-v4-podslice", "2x2x2", 2, 4),
        ("v5e-1", "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5litepod-8", "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5e-256", "tpu-v5-lite-podslice", "16x16", 64, 4),
        ("v5p-32", "tpu-v5p-slice", "2x2x4", 4, 4),
        ("v6e-32", "tpu-v6e-slice", "4x8", 8, 4),
        ("tpu7x-8", "tpu7x", "2x2x1", 1, 4),
        ("tpu7x-16", "tpu7x", "2x2x2", 2, 4),
    ],
)
def test_the_nodes_of_every_slice(capsys, name, accelerator, topology, hosts, chips):
    printed = dry_run(capsys, f"--slice={name}")
    pod = pod_of(printed)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": str(chips)}
    assert printed["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == hosts


def test_several_slices_are_as_many_jobs_of_one_set(capsys):
    printed = dry_run(capsys, "--slice=2xv5e-16")
    [replicated] = printed["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2
    assert replicated["template"]["spec"]["completions"] == 4
    assert pod_of(printed)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    [exclusive] = printed["metadata"]["annotations"]  # each Job has one slice to itself
    assert exclusive.endswith("/exclusive-topology")


def test_kubernetes_own_models_read_every_field_of_the_job(capsys):
    printed = dry_run(capsys, "--spot", "--service_account=trainer")
    [replicated] = printed["spec"]["replicatedJobs"]
    api = client.ApiClient()
    text, kind = json.dumps(replicated["template"]), "V1JobTemplateSpec"
    if len(inspect.signature(api.deserialize).parameters) == 2:  # kubernetes 30, as kfp has it
        read = api.deserialize(types.SimpleNamespace(data=text), kind)
    else:
        read = api.deserialize(text, kind, "application/json")
    assert api.sanitize_for_serialization(read) == replicated["template"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--slice=2xv5e-8"], "GKE joins only slices with several hosts, but v5e-8 has one"),
        (["--config.cluster.mesh=auto"], "Find a mesh with `tftpu preflight --slices=v5e-16`"),
        (["--slice=2xv3-8"], "slices of v3 are not joined by a network"),
        (["--slice=2xv5e-16", "--config.cluster.mesh=fsdp:-1"], "as in 'data:2,fsdp:-1'"),
        (["--slice=v3-8"], "GKE has no slice v3-8, only slices of v4, v5e, v5p, v6e, tpu7x. `"),
        (
            ["--slice=tpu7x-8", "--config.cluster.engine=tensorflow"],
            "tpu7x: use the JAX engine, with --config.cluster.engine=jax",
        ),
        (["--slice=v5e-17"], "There is no v5e-17"),
        (
            ["--slice=v5e-16", "--config.cluster.engine=tensorflow"],
            "add --config.cluster.engine=jax",
        ),
        (["--config.cluster.mesh=fsdp:8"], "needs 8 devices, but there are 16"),
        (["--workdir=runs/x"], "write gs://BUCKET/FOLDER"),
        (["--namespace=Research"], "--namespace=Research is not a valid name in Kubernetes"),
        (["--service_account=a@b"], "Give the name of the Kubernetes service account"),
        (["--timeout=soon"], "a time such as 30s, 5m, 2h or 7d"),
        (["--queue_timeout=soon"], "a time such as 30s, 5m, 2h or 7d"),
        (["--labels=A=b"], "lower-case"),
        (["--restarts=-1"], "--restarts"),
        (["--slcie=v5e-8"], "Did you mean '--slice'?"),
    ],
)
def test_a_mistake_fails_with_one_clear_line(capsys, flags, sentence):
    names = [flag.partition("=")[0] for flag in flags]
    others = [flag for flag in FLAGS if flag.partition("=")[0] not in names]
    assert main.main(["launch", "gke", *others, *flags]) == 2
    check_message(capsys.readouterr().err, sentence)


@pytest.mark.parametrize(("name", "other"), [("v5e-8", True), ("tpu7x-8", False)])
def test_slices_that_gke_does_not_join_are_rented_as_tpu_vms_if_they_can_be(capsys, name, other):
    flags = [flag for flag in FLAGS if not flag.startswith("--slice")]
    assert main.main(["launch", "gke", *flags, f"--slice=2x{name}"]) == 2
    said = capsys.readouterr().err
    assert "choose larger slices." in said and ("`tftpu launch" in said) == other


@pytest.mark.medium
def test_a_dry_run_needs_no_network_credentials_or_client():
    program = """
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
for name in ("kubernetes", "google.cloud.storage", "google.auth", "grpc", "tensorflow"):
    sys.modules[name] = None
from tftpu.launch import main
sys.exit(main.main(["launch", "gke", "--config=digits_resnet", "--slice=v5e-8", *sys.argv[1:]]))
"""
    command = [sys.executable, "-c", program]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    captured = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run([*command, "--dry_run"], check=False, **captured)
    assert done.returncode == 0, done.stderr
    assert "workdir=gs://BUCKET/digits-resnet" in done.stdout
    # Without the client, a run fails with the command that installs it.
    done = subprocess.run([*command, "--workdir=gs://b/run"], check=False, **captured)
    assert done.returncode == 2
    assert "run `pip install 'kubernetes" in done.stderr and "add --dry_run" in done.stderr


@pytest.fixture
def machine(tmp_path) -> RentedMachine:
    return RentedMachine(tmp_path)


@pytest.mark.medium
def test_a_pod_without_gcloud_receives_what_was_sent(machine, tmp_path):
    own = tmp_path / "mine" / "photos.py"
    own.parent.mkdir()
    own.write_text("# é\n")
    sent = shipment.pack(str(own), "tftpu==1.0", "jax")
    address = sent.resolve_address("gs://b/run").removeprefix("gs://")
    objects = {f"{address}/{name}": data for name, data in sent.files.items()}
    tools = machine.folder / "tools"  # of an image that has no gcloud
    tools.mkdir()
    for name in ("bash", "mkdir", "rm", "tar", "gzip", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name))
    (machine.bin / "gcloud").unlink()
    calls = machine.folder / "installed"
    real = f'if [ "$1" = - ]; then exec {sys.executable} "$@"; fi'
    machine.tool("python3", f'{real}; printf "%s\\n" "${{@: -1}}" >>"{calls}"')
    with storage(objects) as host, metadata_server() as server:
        said = machine.run(
            job.build_container_command(sent, "gs://b/run", []),
            STORAGE_EMULATOR_HOST=host,
            GCE_METADATA_HOST=server,
            TFTPU_GCS=str(machine.folder / "none"),
            PATH=f"{machine.bin}:{tools}",
        )
    assert (machine.code, said) == (0, "trained\n")
    assert (machine.home / "code" / "mine" / "photos.py").read_text() == own.read_text()


def test_the_packages_that_would_break_the_engines_tensorflow_are_never_installed():
    for engine, brings, breaks in (
        ("tensorflow", "tensorflow-tpu", "tensorflow-cpu"),
        ("jax", "tensorflow-cpu", "tensorflow-tpu"),
    ):
        never = shipment.pack("digits_resnet", None, engine).files["overrides.txt"].decode()
        assert {line.partition(";")[0] for line in never.splitlines()} == {"tensorflow", breaks}
        assert brings not in never


@pytest.mark.parametrize(("where", "code"), [("training", 75), ("installing", 143)])
def test_the_signal_of_a_preemption_ends_a_pod(machine, where, code):
    sent = shipment.pack("digits_resnet", "tftpu==1.0")
    machine.put(sent.resolve_address("gs://b/run"), sent.files)
    ready = machine.folder / "ready"
    machine.tftpu('printf "%s\\0" "$@" >>"$ARGUMENTS"; exit 75')
    if where == "training":
        machine.tftpu(f'trap "exit 75" TERM; touch {ready}; while true; do /bin/sleep 0.05; done')
    else:
        machine.tool("python3", f"touch {ready}; /bin/sleep 1")
    running = subprocess.Popen(
        job.build_container_command(sent, "gs://b/run", []),
        env={
            "PATH": f"{machine.bin}:/usr/bin:/bin",
            "TFTPU_HOME": str(machine.home),
            "TFTPU_GCS": str(machine.bucket),
            "ARGUMENTS": str(machine.folder / "arguments"),
        },
    )
    until = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)  # as the cluster does, to the container's process 1 alone
    assert running.wait(60) == code
    assert not (machine.folder / "arguments").exists()
