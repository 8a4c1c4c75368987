"""A user's own folder from the command line to the end of its run on a rented machine.

The services of Google are on loopback; the startup script really installs the wheel that was
uploaded and trains. Two words of it are changed, since there is no TPU: `--tpu` and `--workdir`.
"""

import hashlib
import io
import re
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
import yaml
from google.cloud import aiplatform_v1, tpu_v2
from google.cloud.aiplatform_v1.services.job_service import transports as job_transports
from google.cloud.tpu_v2.services.tpu import transports as tpu_transports
from google.longrunning import operations_pb2

from tests.support.fakes.fake_cloud_tpu import CloudTpu
from tests.support.fakes.fake_google_cloud import grpc_service, storage
from tests.support.fakes.fake_kubernetes import Kubernetes, serving
from tests.support.fakes.rented_machine import RentedMachine
from tftpu.launch import main
from tftpu.launch.cloud import job, waiting
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.cloud.tpu_vm import client as tpu_vm_client
from tftpu.launch.cloud.vertex import client as vertex_client

CONFIG = '''"""Digits, a few steps."""
import os
import tftpu
from lengths import STEPS
from tftpu.launch.configs import digits_resnet


def get_config():
    if "TFTPU_HOME" in os.environ:
        print("config of", os.path.abspath(__file__), "with", tftpu.__file__)
    config = digits_resnet.get_config()
    config.train.steps = config.train.eval_every = STEPS
    return config
'''


@pytest.fixture
def own(tmp_path) -> Path:
    """Returns a config that imports the file beside it."""
    folder = tmp_path / "my digits"
    folder.mkdir()
    (folder / "digits.py").write_text(CONFIG)
    (folder / "lengths.py").write_text("STEPS = 3\n")
    (folder / ".gitignore").write_text("*.secret\n/old\n")
    (folder / "password.secret").write_text("12345")
    (folder / "old").mkdir()
    (folder / "old" / "id_rsa").write_text("ignored")
    return folder / "digits.py"


@pytest.fixture
def machine(tmp_path) -> RentedMachine:
    (tmp_path / "machine").mkdir()
    machine = RentedMachine(tmp_path / "machine")
    machine.installing()
    return machine


def without_a_tpu(script: str, run: Path) -> str:
    """Returns the script of a machine with a CPU, and a run in a local folder."""
    changed = re.sub(r"--workdir=\S+ --tpu=local", f"--workdir={run} --tpu=none", script)
    assert changed != script
    return changed


def check_run(run: Path, said: str, machine: RentedMachine) -> None:
    """Checks that a run ended, in which the code that was sent was used and no other."""
    assert (run / "checkpoints" / "3" / "manifest.json").exists()
    config, package = re.search(r"config of (.*) with (.*)", said).groups()
    assert config == f"{machine.home}/code/my digits/digits.py"
    assert package.startswith(f"{machine.home}/venv/")


def check_files(objects: dict[str, bytes], sums: str) -> None:
    """Checks that the bucket received the wheel and the code, whose hashes the request holds."""
    received = {name.rpartition("/")[2]: data for name, data in objects.items() if "/code-" in name}
    found = {f"{hashlib.sha256(data).hexdigest()}  {n}" for n, data in received.items()}
    assert found == set(sums.splitlines())
    (wheel,) = (data for name, data in received.items() if name.endswith(".whl"))
    assert "tftpu/launch/cloud/shipping/machine.sh" in zipfile.ZipFile(io.BytesIO(wheel)).namelist()
    with tarfile.open(fileobj=io.BytesIO(received["code.tar.gz"])) as tar:
        assert tar.getnames() == [
            f"my digits/{name}" for name in (".gitignore", "digits.py", "lengths.py")
        ]
    assert re.search(r"^keras==3\.", received["constraints.txt"].decode(), re.M)


@pytest.mark.slow
def test_a_tpu_vm_receives_wheel_and_code_and_trains_to_the_end(own, machine, monkeypatch, capfd):
    objects: dict[str, bytes] = {}
    fake = CloudTpu(objects)
    fake.states, fake.hangs = [["ACTIVE"]], True  # the machine itself reports its end
    run, outputs, scripts = machine.folder / "run", [], []

    def boot(script: str, host: str) -> None:
        file = machine.folder / "startup-script"
        file.write_text(without_a_tpu(script, run))
        outputs.append(machine.run(["bash", str(file)], timeout=240, STORAGE_EMULATOR_HOST=host))

    def create(request):
        (spec,) = request.queued_resource.tpu.node_spec
        scripts.append(spec.node.metadata["startup-script"])
        threading.Thread(target=boot, args=(scripts[0], host)).start()
        return fake.create(request)

    methods = {
        "CreateQueuedResource": (
            create,
            tpu_v2.CreateQueuedResourceRequest,
            operations_pb2.Operation,
        ),
        "GetQueuedResource": (fake.get, tpu_v2.GetQueuedResourceRequest, tpu_v2.QueuedResource),
        "DeleteQueuedResource": (
            fake.delete,
            tpu_v2.DeleteQueuedResourceRequest,
            operations_pb2.Operation,
        ),
    }
    monkeypatch.setattr(waiting, "POLL_S", 0.2)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with grpc_service("google.cloud.tpu.v2.Tpu", methods) as channel, storage(objects) as host:
        client = tpu_v2.TpuClient(transport=tpu_transports.TpuGrpcTransport(channel=channel))
        monkeypatch.setattr(tpu_vm_client, "create_client", lambda: client)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        code = main.main(
            [
                *("launch", "tpu-vm", f"--config={own}", "--slice=v5e-8", "--zone=us-west4-a"),
                *("--project=p", "--workdir=gs://b/run", "--yes"),
            ]
        )
    said = capfd.readouterr()
    assert code == 0, said.err + said.out + "".join(outputs)
    check_files(objects, re.search(r"sums='(.*?)'", scripts[0], re.S)[1])
    check_run(run, said.out, machine)  # the log came back by the bucket
    assert not fake.slices
    for shown in ("digits.py  ", "lengths.py  ", "sha256 ", "keras==3."):
        assert shown in said.out
    assert "password" not in said.out + said.err


@pytest.mark.slow
def test_a_vertex_job_receives_wheel_and_code_and_trains_to_the_end(own, machine, monkeypatch):
    objects: dict[str, bytes] = {}
    created = []

    def create(request):
        created.append(request.custom_job)
        return aiplatform_v1.CustomJob(request.custom_job, name="projects/p/customJobs/1")

    kinds = (aiplatform_v1.CreateCustomJobRequest, aiplatform_v1.CustomJob)
    methods = {"CreateCustomJob": (create, *kinds)}
    service = "google.cloud.aiplatform.v1.JobService"
    with grpc_service(service, methods) as channel, storage(objects) as host:
        transport = job_transports.JobServiceGrpcTransport(channel=channel)
        client = aiplatform_v1.JobServiceClient(transport=transport)
        monkeypatch.setattr(vertex_client, "create_client", lambda region: client)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        flags = ("--slice=v3-8", "--project=p", "--workdir=gs://b/run", "--detach")
        assert main.main(["launch", "vertex", f"--config={own}", *flags]) == 0
    (pool,) = created[0].job_spec.worker_pool_specs
    *bash, script = pool.container_spec.command
    check_files(objects, re.search(r"sums='(.*?)'", script, re.S)[1])
    for name, data in objects.items():
        machine.put(f"gs://{name.rpartition('/')[0]}", {name.rpartition("/")[2]: data})
    command = [*bash, without_a_tpu(script, machine.folder / "run")]
    said = machine.run(command, timeout=240, TFTPU_GCS=str(machine.bucket))
    assert machine.code == 0, said
    check_run(machine.folder / "run", said, machine)


@pytest.mark.slow
def test_a_pod_receives_wheel_and_code_and_trains_to_the_end(own, machine, monkeypatch, tmp_path):
    objects: dict[str, bytes] = {}
    cluster = Kubernetes()
    with serving(cluster, tmp_path) as kubeconfig, storage(objects) as host:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        flags = ("--slice=v5e-8", "--namespace=research", "--workdir=gs://b/run", "--detach")
        jax = "--config.cluster.engine=jax"
        assert main.main(["launch", "gke", f"--config={own}", jax, *flags]) == 0
        template = cluster.created[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        *bash, script = template["spec"]["containers"][0]["command"]
        check_files(objects, re.search(r"sums='(.*?)'", script, re.S)[1])
        command = [*bash, without_a_tpu(script, machine.folder / "run")]
        said = machine.run(command, timeout=240, STORAGE_EMULATOR_HOST=host)
    assert machine.code == 0, said
    check_run(machine.folder / "run", said, machine)


PLACES = [("tpu-vm", "v3-8"), ("vertex", "v3-8"), ("gke", "v5e-8")]


@pytest.mark.medium
@pytest.mark.parametrize(("where", "slice_name"), PLACES)
def test_a_dry_run_shows_what_would_travel(own, where, slice_name, capsys):
    flags = [f"--config={own}", f"--slice={slice_name}", "--workdir=gs://b/run", "--dry_run"]
    assert main.main(["launch", where, *flags]) == 0
    text = capsys.readouterr().out
    assert isinstance(yaml.safe_load(text), dict)  # still what gcloud or kubectl takes
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    sent = shipment.pack(str(own), None)
    assert f"# tftpu uploads to {sent.resolve_address('gs://b/run')}:\n" in head
    for name, data in sent.files.items():
        assert hashlib.sha256(data).hexdigest() in head
        assert f"#   {name}  " in head
    assert f"code.tar.gz is {own.parent}, 3 files of " in head
    assert "#   lengths.py  10 bytes\n" in head
    assert "tensorflow-tpu==2.20.0" in head


@pytest.mark.medium
def test_equal_code_has_one_address_and_changed_code_another(own):
    first, again = (shipment.pack(str(own), None).resolve_address("gs://b/run") for _ in range(2))
    (own.parent / "lengths.py").write_text("STEPS = 4\n")
    assert first == again != shipment.pack(str(own), None).resolve_address("gs://b/run")


@pytest.mark.parametrize(("where", "slice_name"), PLACES)
def test_a_secret_in_the_folder_ends_the_launch_before_anything_is_sent(
    own, where, slice_name, capsys
):
    (own.parent / ".env").write_text("TOKEN=1\n")
    flags = [f"--config={own}", f"--slice={slice_name}", "--workdir=gs://b/run", "--dry_run"]
    assert main.main(["launch", where, *flags]) == 2
    said = capsys.readouterr()
    assert ".env (its name)" in said.err
    assert ".gitignore" in said.err
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.medium
@pytest.mark.parametrize(("where", "slice_name"), PLACES)
def test_data_in_the_folder_are_named_and_asked_about_before_anything_is_sent(
    own, where, slice_name, capsys, monkeypatch, tmp_path
):
    (own.parent / "export").mkdir()
    (own.parent / "export" / "saved_model.pb").write_bytes(bytes(1_500_000))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    asked: list[str] = []
    monkeypatch.setattr(job, "input", lambda text: asked.append(text) or "no", raising=False)
    flags = [f"--config={own}", f"--slice={slice_name}", "--workdir=gs://b/run"]
    flags += ["--namespace=research"] if where == "gke" else ["--project=p"]
    flags += ["--zone=us-west4-a", "--yes"] if where == "tpu-vm" else []
    with serving(Kubernetes(), tmp_path) as kubeconfig, storage({}) as host:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        assert main.main(["launch", where, *flags]) == 2
        said = capsys.readouterr().err
        assert "export/ (1.5 MB) in" in said and "add --send_data" in said
        assert not asked
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        assert main.main(["launch", where, *flags]) == 2
        assert asked == ["Send them, too? [y/N] "]
        assert "Nothing is sent" in capsys.readouterr().err
    sent = shipment.pack(str(own), None)
    job.confirm_data(sent, send_data=True)
    assert len(asked) == 1


@pytest.mark.parametrize("package", ["dist/tftpu-1.whl", "tftpu-1.tar.gz", "~/tftpu-1.whl", "."])
def test_a_wheel_that_is_not_here_is_found_before_it_costs(own, package, monkeypatch, capsys):
    monkeypatch.chdir(own.parent)
    (own.parent / "tftpu-1.tar.gz").touch()
    flags = [f"--config={own}", "--slice=v5e-8", "--dry_run", f"--package={package}"]
    assert main.main(["launch", "tpu-vm", *flags]) == 2
    said = capsys.readouterr().err
    assert f"--package={package} is no wheel on this machine" in said and said.count("\n") == 1


def test_the_name_of_an_index_is_used_only_where_the_user_writes_one():
    assert shipment.pack("digits_resnet", None).package.endswith("-py3-none-any.whl")
    written = shipment.pack("digits_resnet", "tftpu[tpu]==1.0")
    assert written.package == "tftpu[tpu]==1.0"
    assert set(written.files) == {"constraints.txt", "overrides.txt"}
