"""`tftpu launch tpu-vm` on slices of several hosts: the script of each worker, and the outcome."""

import re
import shlex
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import yaml
from google.cloud import tpu_v2
from google.protobuf import json_format

from tests.support.fakes.fake_cloud_tpu import QUEUED, serving
from tests.support.fakes.fake_google_cloud import Fault
from tests.support.fakes.rented_machine import RentedMachine
from tests.support.interrupts import interrupt_waiting
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.cloud.tpu_vm import job, rented, workers
from tftpu.tpu.slices import parse_slice

JAX = "--config.cluster.engine=jax"
FLAGS = (
    *("--config=digits_resnet", "--config.train.steps=5", "--config.model.norm_batch=8", JAX),
    *("--slice=v5e-16", "--zone=us-west4-a", "--project=p", "--workdir=gs://b/run"),
)  # four hosts of four chips
_OTHERS_S = workers.OTHERS_S
DELETION = "compute tpus queued-resources delete n --force --quiet --project=p --zone=us-west4-a"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(workers, "OTHERS_S", 0.2)


@pytest.fixture
def service(monkeypatch):
    with serving(monkeypatch) as fake:
        yield fake


@pytest.fixture
def machine(tmp_path) -> RentedMachine:
    machine = RentedMachine(tmp_path)
    for number in (1, 2, 3, 7):
        (machine.bucket / f"b/run/launch/n/worker-{number}").mkdir(parents=True)
    return machine


def launch(*flags: str) -> int:
    return main.main(["launch", "tpu-vm", *FLAGS, "--yes", *flags])


def order(slice_name: str = "v5e-16") -> job.TpuVmJob:
    return job.TpuVmJob(
        config="digits_resnet",
        overrides=(JAX,),
        slice=parse_slice(slice_name),
        project="p",
        zone="us-west4-a",
        workdir="gs://b/run",
        shipment=shipment.pack("digits_resnet", "tftpu[jax-tpu]==1.0", "jax"),
    )


def boot(machine: RentedMachine, slice_name: str = "v5e-16") -> Path:
    """Runs the script of a worker; returns the reports' folder."""
    wanted = order(slice_name)
    machine.put(wanted.shipment.resolve_address(wanted.workdir), wanted.shipment.files)
    return machine.boot(wanted.build_startup_script("n"), "n")


def worker(machine: RentedMachine, number: int) -> None:
    """Makes the metadata server name the machine as one of the workers."""
    asked = f'printf "%s\\n" "$*" >>{machine.folder}/asked_metadata'
    machine.tool("curl", f"{asked}; echo {number}")


@pytest.mark.parametrize(
    ("name", "accelerator", "hosts"),
    [
        ("v5e-16", "v5litepod-16", 4),
        ("v5e-256", "v5litepod-256", 64),
        ("v6e-16", "v6e-16", 4),
        ("v5p-16", "v5p-16", 2),
        ("v4-32", "v4-32", 4),
        ("v3-32", "v3-32", 4),
        ("v6e-8", "v6e-8", 1),
    ],
)
def test_the_request_of_a_pod_is_one_node_whose_script_knows_the_number_of_workers(
    name, accelerator, hosts
):
    request = order(name).build_request("n")
    (spec,) = request["tpu"]["nodeSpec"]
    assert spec["node"]["acceleratorType"] == accelerator
    assert spec["nodeId"] == "n" and "multisliceParams" not in spec
    assert f"\nslices=1\nhosts={hosts}\n" in spec["node"]["metadata"]["startup-script"]


def test_the_request_of_several_slices_is_as_many_nodes_that_start_together(capsys):
    request = order("2xv5e-16").build_request("n")
    message = json_format.ParseDict(request, tpu_v2.QueuedResource.pb(tpu_v2.QueuedResource()))
    (spec,) = tpu_v2.QueuedResource(message).tpu.node_spec
    assert (spec.multislice_params.node_count, spec.multislice_params.node_id_prefix) == (2, "n")
    assert spec.node.accelerator_type == "v5litepod-16" and not spec.node_id
    assert "\nslices=2\nhosts=4\n" in spec.node.metadata["startup-script"]
    assert launch("--slice=2xv5e-16", "--dry_run", "--config.model.norm_batch=4") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["--node-count"] == 2 and "--node-id" not in printed
    assert printed["--node-prefix"].startswith("digits-resnet")


@pytest.mark.parametrize(
    ("name", "answers", "place"),
    [
        ("2xv5e-16", (3, 1), "worker-7/"),
        ("2xv5e-16", (0, 0), ""),
        ("3xv5e-8", (0, 2), "worker-2/"),  # of one host each
    ],
)
def test_the_workers_of_several_slices_are_counted_on(machine, name, answers, place):
    number, slice_id = answers
    environment = f"ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_SLICE_ID: '{slice_id}'\n"
    (machine.folder / "tpu-env").write_text(environment)
    machine.tool(
        "curl", f'case "$*" in *tpu-env) cat {machine.folder}/tpu-env ;; *) echo {number} ;; esac'
    )
    reports = boot(machine, name)
    assert (reports / f"{place}exit_code").read_text() == "0\n"


@pytest.mark.slow
def test_a_worker_that_does_not_learn_its_slice_says_so_and_ends(machine):
    (machine.bucket / "b/run/launch/n/worker-11").mkdir(parents=True)
    machine.tool("curl", 'case "$*" in *tpu-env) exit 22 ;; *) echo 3 ;; esac')
    reports = boot(machine, "2xv5e-16")
    assert "which slice this worker belongs to" in (reports / "worker-11/log.txt").read_text()
    assert (reports / "worker-11/exit_code").read_text() == "1\n"
    assert (reports / "failed").read_text() == "1\n"
    assert machine.lines("called") == [DELETION]
    assert not (machine.folder / "arguments").exists()


def test_a_mesh_that_cuts_the_model_between_slices_is_refused(capsys):
    mesh = "--config.cluster.mesh=fsdp:-1"
    assert launch("--slice=2xv5e-8", "--dry_run", mesh) == 2
    assert "as in 'data:2,fsdp:-1'" in capsys.readouterr().err
    assert launch("--slice=2xv5e-8", "--dry_run", "--config.cluster.mesh=data:2,fsdp:-1") == 0


def test_the_tensorflow_engine_is_refused_with_the_flag_to_add(capsys):
    flags = [flag for flag in FLAGS if flag != JAX]
    assert main.main(["launch", "tpu-vm", *flags, "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert "v5e-16 has 4 hosts, but the TensorFlow engine uses one" in error
    assert "add --config.cluster.engine=jax" in error
    assert launch("--dry_run") == 0
    printed = capsys.readouterr().out
    assert "extras=jax-tpu" in printed
    assert "jax[tpu]<0.11,>=0.10" in printed


def test_a_mesh_that_does_not_fit_the_slice_fails_before_it_is_rented(capsys):
    assert launch("--dry_run", "--config.cluster.mesh=fsdp:8") == 2
    assert "The mesh 'fsdp:8' needs 8 devices, but there are 16" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "place"), [(0, ""), (3, "worker-3/")])
def test_every_worker_trains_and_reports_to_a_place_of_its_own(machine, number, place):
    worker(machine, number)
    reports = boot(machine)
    (asked,) = machine.lines("asked_metadata")
    assert asked.endswith("/computeMetadata/v1/instance/attributes/agent-worker-number")
    assert machine.arguments()[:3] == ["train", "--config=digits_resnet", JAX]
    assert (reports / f"{place}log.txt").read_text() == "trained\n"
    assert (reports / f"{place}exit_code").read_text() == "0\n"
    assert not (reports / "failed").exists()
    assert machine.lines("called") == [DELETION]
    assert machine.lines("slept")[-1] == ("1200" if number else "900")


def test_a_single_host_does_not_ask_for_its_number(machine):
    worker(machine, 7)
    boot(machine, "v5e-8")
    assert not machine.lines("asked_metadata")


def test_a_worker_that_fails_tells_the_others(machine):
    worker(machine, 2)
    machine.tftpu("exit 1")
    reports = boot(machine)
    assert (reports / "worker-2/exit_code").read_text() == "1\n"
    assert (reports / "failed").exists()


def test_a_saved_stop_is_no_failure_of_the_others(machine):
    worker(machine, 0)
    machine.tftpu("exit 75")
    assert not (boot(machine) / "failed").exists()


def test_a_worker_that_waits_for_a_failed_one_is_stopped(machine):
    worker(machine, 0)
    machine.put("gs://b/run/launch/n", {"failed": b"1\n"})
    machine.tftpu('trap "echo stopped; exit 75" TERM; while true; do /bin/sleep 0.1; done')
    reports = boot(machine)
    assert (reports / "exit_code").read_text() == "69\n"
    assert (reports / "log.txt").read_text().endswith("stopped\n")  # it had the time to save
    assert "60" in machine.lines("slept")


@pytest.mark.medium
def test_all_workers_of_a_slice_end_when_one_fails(tmp_path):
    """Four machines boot at the same time, and share nothing but the bucket."""
    machines = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        machines.append(RentedMachine(tmp_path / str(number)))
        worker(machines[-1], number)
        machines[-1].tftpu('trap "exit 75" TERM; while true; do /bin/sleep 0.05; done')
        if number:
            machines[-1].bucket.rmdir()
            machines[-1].bucket.symlink_to(machines[0].bucket)
            (machines[0].bucket / f"b/run/launch/n/worker-{number}").mkdir(parents=True)
    machines[2].tftpu("/bin/sleep 0.5; echo out of memory; exit 1")
    with futures.ThreadPoolExecutor(4) as pool:
        reports, *_ = pool.map(boot, machines)
    codes = [(reports / "exit_code").read_text()]
    codes += [(reports / f"worker-{number}/exit_code").read_text() for number in (1, 2, 3)]
    assert codes == ["69\n", "69\n", "1\n", "69\n"]
    assert (reports / "worker-2/log.txt").read_text() == "out of memory\n"


def test_all_workers_are_followed_to_one_end(service, capsys):
    service.others = {1: 0, 2: 0, 3: 0}
    assert launch() == 0
    said = capsys.readouterr().out
    name = service.requests[0].queued_resource_id
    assert "Output of worker 0 is shown; workers 1 to 3 write to gs://b/run/launch/" in said
    assert f"trained on {name}" in said
    assert "worker 1 of" not in said
    assert "19.20 USD an hour" in said  # 16 chips
    assert not service.slices


def test_what_cloud_tpu_answers_describes_the_slices(service):
    found = order("2xv5e-16")
    wanted = found.build_request("n")
    resource = tpu_v2.QueuedResource(name=f"{found.parent}/queuedResources/n")
    json_format.ParseDict({"tpu": wanted["tpu"]}, tpu_v2.QueuedResource.pb(resource))
    assert rented.from_resource(resource) == found.describe_slice("n")


def test_one_worker_fails_and_the_slice_is_deleted(service, capsys):
    service.exit_codes = [69]  # what the others notice
    service.others = {1: 69, 2: 1, 3: 69}
    assert launch() == 2
    said = capsys.readouterr()
    assert "The last lines of worker 2:\nworker 2 of " in said.out
    assert "Worker 2 ended with code 1, and the run with it; gs://b/run/launch/" in said.err
    assert "/worker-2/log.txt has its output" in said.err
    assert not service.slices


def test_one_worker_never_starts(service, capsys):
    service.exit_codes = [1]
    service.others = {1: 1, 2: None, 3: 1}
    assert launch() == 2
    error = capsys.readouterr().err
    assert "No exit code came from worker 2: it never started, or was lost" in error
    assert not service.slices


def test_a_lost_worker_of_a_spot_slice_resumes_on_another_slice(service, capsys):
    service.states = [["ACTIVE", "ACTIVE", "ACTIVE", "SUSPENDING"], ["ACTIVE"]]
    service.exit_codes = [69, 0]
    run = service._run
    seen = []

    def lost_at_first(name):
        seen.append(name)
        service.others = {1: 0, 2: 0, 3: 0}
        run(name)

    service._run = lost_at_first
    get = service.get

    def preempted_after_the_others_noticed(request):
        name = request.name.rpartition("/")[2]
        if service.requests[0].queued_resource_id == name and not seen:
            service.objects[f"b/run/launch/{name}/exit_code"] = b"69\n"
        return get(request)

    service.get = preempted_after_the_others_noticed
    assert launch("--spot") == 0
    assert len(service.requests) == 2
    assert not service.slices
    assert "preempted: requesting another one" in capsys.readouterr().out


def test_a_pod_that_was_stopped_and_saved_is_rented_again(service):
    service.exit_codes = [75, 0]
    service.others = {1: 75, 2: 69, 3: 75}
    ends = iter([{1: 75, 2: 69, 3: 75}, {1: 0, 2: 0, 3: 0}])
    run = service._run
    seen = {}

    def ended(name):
        service.others = seen.setdefault(name, None) or next(ends)
        seen[name] = service.others
        run(name)

    service._run = ended
    assert launch("--spot") == 0
    assert len(service.requests) == 2


def test_a_pod_that_is_preempted_while_queued_is_requested_again(service, capsys):
    service.others = {1: 0, 2: 0, 3: 0}
    service.states = [["ACCEPTED", "PROVISIONING", "SUSPENDED"], [*QUEUED, "ACTIVE"]]
    assert launch("--spot") == 0
    assert len(service.requests) == len(service.deleted) == 2
    assert "preempted: requesting another one" in capsys.readouterr().out


@pytest.mark.medium
def test_the_network_is_lost_after_the_creation_of_a_pod(service, capsys):
    service.loses_answer = True
    lost = Fault(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
    service.faults["get"] = service.faults["delete"] = [lost] * 10_000
    assert launch() == 2
    [name] = [request.queued_resource_id for request in service.requests]
    assert f"The slice {name} could not be deleted" in capsys.readouterr().out
    assert len(service.slices) == 1


def test_the_launcher_stops_waiting_before_a_worker_deletes_the_slice():
    script = (Path(job.__file__).parent / "startup.sh").read_text()
    delays = {int(seconds) for seconds in re.findall(r"delete_after (\d+)", script)}
    assert min(delays) > _OTHERS_S + 3 * waiting.POLL_S


def test_workers_that_do_not_report_after_a_good_end_are_mentioned(service, capsys):
    service.others = {1: 0, 2: 0, 3: None}
    assert launch() == 0
    said = capsys.readouterr().out
    assert "The run ended well; " in said
    assert "No exit code came from worker 3" in said
    assert not service.slices


def test_an_interrupt_leaves_all_workers_running_and_says_so(service, capsys, monkeypatch):
    service.hangs = True
    service.states = [["ACTIVE"]]

    interrupt_waiting(monkeypatch)
    assert launch() == 0
    name = service.requests[0].queued_resource_id
    said = capsys.readouterr().out
    assert "The run continues, and incurs costs; this deletes it: " in said
    assert shlex.join(["queued-resources", "delete", name]) in said
    assert len(service.slices) == 1
