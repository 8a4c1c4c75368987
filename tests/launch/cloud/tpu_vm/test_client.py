"""`tftpu launch tpu-vm` with Cloud TPU's real client against a service on loopback."""

import sys

import grpc
import pytest
from google.api_core.operation import Operation
from google.longrunning import operations_pb2
from google.rpc import status_pb2

from tests.support.fakes.fake_cloud_tpu import QUEUED, CloudTpu, serving
from tests.support.fakes.fake_google_cloud import SECRET, SECRETS, Fault, storage
from tests.support.interrupts import interrupt_waiting
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.tpu_vm import client

FLAGS = (
    *("--config=digits_resnet", "--slice=v5e-8", "--zone=us-west4-a", "--project=p"),
    *("--workdir=gs://b/run", "--yes", "--config.train.steps=5"),
)
PARENT = "projects/p/locations/us-west4-a"


UNREACHABLE = Fault(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")


@pytest.fixture
def service(monkeypatch):
    with serving(monkeypatch) as fake:
        yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "tpu-vm", *FLAGS, *flags])


def id_of(service, number: int = 0) -> str:
    return service.requests[number].queued_resource_id


def delete_command(name: str) -> str:
    return (
        f"gcloud compute tpus queued-resources delete {name} --force --quiet --project=p "
        "--zone=us-west4-a"
    )


def test_the_request_field_by_field(service):
    assert launch("--spot", "--service_account=sa@p", "--labels=team=vision") == 0
    (request,) = service.requests
    wanted = request.queued_resource
    (spec,) = wanted.tpu.node_spec
    node = spec.node
    assert request.parent == spec.parent == PARENT
    assert request.queued_resource_id == spec.node_id
    assert node.accelerator_type == "v5litepod-8"
    assert node.runtime_version == "v2-alpha-tpuv5-lite"
    assert node.network_config.enable_external_ips
    assert node.service_account.email == "sa@p"
    assert node.service_account.scope == ["https://www.googleapis.com/auth/cloud-platform"]
    assert dict(node.labels) == {
        "tftpu": tpu_vm_version(),
        "config": "digits-resnet",
        "slice": "v5e-8",
        "team": "vision",
    }
    assert set(node.metadata) == {"startup-script"}
    assert "--config.train.steps=5" in node.metadata["startup-script"]
    assert wanted.queueing_policy.valid_until_duration.total_seconds() == 86400
    assert "spot" in wanted
    assert not wanted.reservation_name


def tpu_vm_version() -> str:
    from tftpu.version import __version__

    return __version__.replace(".", "-")


def test_it_rents_follows_and_deletes_the_slice(service, capsys):
    assert launch() == 0
    said = capsys.readouterr().out
    assert "9.60 USD an hour" in said
    assert delete_command(id_of(service)) in said
    assert [line.split("  ")[1] for line in said.splitlines() if line[2:3] == ":"] == [
        "accepted",
        "waiting for resources",
        "provisioning",
        "active",
    ]
    assert said.count(f"trained on {id_of(service)}") == 1
    assert said.endswith(f"Deleted the slice {id_of(service)}.\n")
    assert not service.slices
    assert "spot" not in service.requests[0].queued_resource


def test_a_kept_slice_is_named(service, capsys):
    assert launch("--keep") == 0
    assert len(service.slices) == 1
    said = capsys.readouterr().out
    assert f"The slice {id_of(service)} is kept, and incurs costs; this deletes it: " in said


def test_a_failed_run_deletes_the_slice(service, capsys):
    service.exit_codes = [2]
    assert launch() == 2
    assert not service.slices
    assert "ended with code 2; gs://b/run/launch/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message", "says"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded.",
            "The quota is exceeded",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "Permission 'tpu.nodes.create' denied on 'projects/p'",
            "tpu.nodes.create",
        ),
        (grpc.StatusCode.UNAUTHENTICATED, "no", "gcloud auth application-default login"),
        (grpc.StatusCode.INVALID_ARGUMENT, "Accelerator type not found in zone", "not found in"),
    ],
)
def test_a_rejected_request_fails_with_one_clear_line_and_rents_nothing(
    service, capsys, code, message, says
):
    service.faults["create"] = [Fault(code, message)]
    assert launch() == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert "Deleted" not in captured.out
    assert not service.slices


def test_a_quota_that_is_found_exceeded_later(service, capsys):
    create = service.create

    def accepted_then_refused(request):
        create(request)
        status = status_pb2.Status(code=8, message="Quota limit 'TPUV5' has been exceeded.")
        return operations_pb2.Operation(name="operations/1", done=True, error=status)

    service.create = accepted_then_refused
    assert launch() == 2
    assert "The quota is exceeded (requesting the slice)" in capsys.readouterr().err
    assert not service.slices


def test_no_capacity(service, capsys):
    service.states = [["ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED"]]
    service.failure = "There is no more capacity in the zone"
    assert launch() == 2
    captured = capsys.readouterr()
    assert "There is no capacity for v5e-8 in us-west4-a: There is no more capacity" in captured.err
    assert not service.slices  # a failed request stays in the list, and in the quota, if left


def test_preempted_while_queued(service, capsys):
    service.states = [["ACCEPTED", "PROVISIONING", "SUSPENDED"], [*QUEUED, "ACTIVE"]]
    assert launch("--spot") == 0
    assert len(service.requests) == len(service.deleted) == 2
    assert not service.slices
    assert "preempted: requesting another one" in capsys.readouterr().out


def test_a_run_preempted_while_training_resumes_on_another_slice(service, capsys):
    service.states = [["ACTIVE", "ACTIVE", "SUSPENDING"], [*QUEUED, "ACTIVE"]]
    assert launch("--spot") == 0
    assert not service.slices
    assert id_of(service, 0) != id_of(service, 1)
    workdirs = [
        line
        for request in service.requests
        for line in request.queued_resource.tpu.node_spec[0]
        .node.metadata["startup-script"]
        .splitlines()
        if line.startswith("arguments=")
    ]
    assert workdirs[0] == workdirs[1]  # the same run, which resumes from its checkpoint
    assert f"trained on {id_of(service, 1)}" in capsys.readouterr().out


def test_a_stopped_and_saved_run_resumes_on_another_slice(service):
    service.exit_codes = [75, 0]
    assert launch("--spot") == 0
    assert len(service.requests) == 2
    assert not service.slices


def test_an_interrupt_while_a_preempted_slice_is_deleted_rents_no_other(
    service, capsys, monkeypatch
):
    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    service.states = [["SUSPENDED"]]

    def delete(request):
        monkeypatch.setattr(Operation, "result", interrupt)
        return CloudTpu.delete(service, request)

    service.delete = delete
    assert launch("--spot") == 130
    assert len(service.requests) == 1
    assert delete_command(id_of(service)) in capsys.readouterr().out


def test_a_lost_exit_code_does_not_leave_the_slice_running(service, capsys, monkeypatch):
    service.hangs = True
    monkeypatch.setattr(client, "OVERDUE_S", -59.9)
    assert launch("--timeout=1m") == 2
    said = capsys.readouterr()
    assert f"No exit code came from {id_of(service)} within --timeout=1m" in said.err
    assert not service.slices


def test_a_run_that_took_too_long_is_called_so(service, capsys):
    service.exit_codes = [124]
    assert launch() == 2
    assert "took longer than --timeout=7d" in capsys.readouterr().err


def test_a_slice_that_is_not_spot_is_not_rented_again(service, capsys):
    service.states = [["ACTIVE", "SUSPENDED"]]
    assert launch() == 2
    assert len(service.requests) == 1
    assert not service.slices
    assert (
        "The same `tftpu launch tpu-vm` command resumes from the last checkpoint"
        in capsys.readouterr().err
    )


def test_an_answer_lost_after_the_creation(service):
    service.loses_answer = True
    assert launch() == 0
    assert len(service.requests) == 1
    assert not service.slices


def test_a_request_that_never_arrived(service, capsys):
    service.faults["create"] = [UNREACHABLE]
    assert launch() == 2
    error = capsys.readouterr().err
    assert "the request never arrived" in error
    assert "queued-resources delete digits-resnet-" in error
    assert not service.slices


@pytest.mark.medium
def test_the_network_is_lost_after_the_creation(service, capsys):
    service.loses_answer = True
    service.faults["get"] = service.faults["delete"] = [UNREACHABLE] * 10_000
    assert launch() == 2
    captured = capsys.readouterr()
    assert len(service.slices) == 1
    name = id_of(service)
    assert f"The slice {name} could not be deleted" in captured.out
    assert delete_command(name) in captured.out
    assert "No answer from Google Cloud" in captured.err


def test_the_network_is_lost_while_it_trains(service, capsys):
    service.hangs = True
    get = service.get
    seen = []

    def lost_when_active(request):
        if seen and seen[-1] == "ACTIVE":
            raise UNREACHABLE
        answer = get(request)
        seen.append(answer.state.state.name)
        return answer

    service.get = lost_when_active
    assert launch() == 2
    said = capsys.readouterr().out
    assert (
        "The run may continue, and incur costs; this deletes it: " + delete_command(id_of(service))
        in said
    )
    assert len(service.slices) == 1  # it may still be training


def test_a_lost_network_that_recovers_is_tolerated(service, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE_S", 5)
    service.faults["get"] = [UNREACHABLE] * 3
    service.faults["delete"] = [UNREACHABLE] * 3
    assert launch() == 0
    assert not service.slices


def test_too_many_questions_do_not_lose_the_place_in_the_queue(service, capsys):
    service.faults["get"] = [Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "Read requests per minute.")]
    assert launch() == 0
    assert len(service.requests) == 1
    said = capsys.readouterr().out
    assert "Read requests per minute." in said and "Trying again for" in said


def test_a_rejected_deletion_names_the_slice(service, capsys):
    service.faults["delete"] = [Fault(grpc.StatusCode.PERMISSION_DENIED, "tpu.nodes.delete denied")]
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"The slice {id_of(service)} could not be deleted" in said
    assert delete_command(id_of(service)) in said


@pytest.mark.parametrize("active", [False, True])
def test_an_interrupt(service, capsys, monkeypatch, active):
    service.hangs = True
    service.states = [["ACTIVE"] if active else ["WAITING_FOR_RESOURCES"]]
    interrupt_waiting(monkeypatch)
    code = launch()
    captured = capsys.readouterr()
    name = id_of(service)
    if active:  # it is training: kept, and named
        assert code == 0
        assert len(service.slices) == 1
        message = f"The run continues, and incurs costs; this deletes it: {delete_command(name)}"
        assert message in captured.out
        attach = f"tftpu launch tpu-vm-attach {name} --zone=us-west4-a --project=p"
        assert captured.out.endswith(f"This follows it again: {attach}\n")
    else:  # nothing ran on it
        assert code == 130
        assert not service.slices
        assert f"Deleted the slice {name}." in captured.out


def leave_alone(service, monkeypatch, *flags: str) -> str:
    """Starts a run whose launcher is interrupted; returns the name of its slice."""
    service.hangs = True
    service.states = [["ACTIVE"]]
    with monkeypatch.context() as patched:
        interrupt_waiting(patched)
        assert launch(*flags) == 0
    service.hangs = False
    return id_of(service)


def attach(name: str) -> int:
    place = "--zone=us-west4-a", "--project=p"
    return main.main(["launch", "tpu-vm-attach", name, *place])


def test_a_run_that_was_left_alone_is_followed_again(service, capsys, monkeypatch):
    name = leave_alone(service, monkeypatch)
    capsys.readouterr()
    assert attach(name) == 0
    said = capsys.readouterr().out
    assert f"trained on {name}" in said
    assert said.endswith(f"Deleted the slice {name}.\n")
    assert not service.slices


def test_a_kept_slice_is_kept_by_whoever_follows_its_run(service, capsys, monkeypatch):
    name = leave_alone(service, monkeypatch, "--keep")
    assert attach(name) == 0
    assert len(service.slices) == 1
    assert f"The slice {name} is kept" in capsys.readouterr().out


def test_a_failed_run_that_is_followed_again_ends_with_its_code(service, capsys, monkeypatch):
    service.exit_codes = [3]
    name = leave_alone(service, monkeypatch)
    assert attach(name) == 2
    assert f"code 3; gs://b/run/launch/{name}/log.txt" in capsys.readouterr().err
    assert not service.slices


def test_a_followed_slice_that_is_preempted_is_deleted(service, capsys, monkeypatch):
    name = leave_alone(service, monkeypatch)
    (service.slices[f"{PARENT}/queuedResources/{name}"],) = [["SUSPENDED"]]
    assert attach(name) == 2
    assert "`tftpu launch tpu-vm` command resumes" in capsys.readouterr().err
    assert not service.slices


def test_a_slice_that_is_gone_or_of_something_else_is_not_followed(service, capsys, monkeypatch):
    assert attach("gpt-1122-14d641") == 2
    assert "There is no slice gpt-1122-14d641 in us-west4-a" in capsys.readouterr().err
    name = leave_alone(service, monkeypatch)
    service.requests[0].queued_resource.tpu.node_spec[0].node.metadata["startup-script"] = "ls"
    assert attach(name) == 2
    assert "is not a slice that `tftpu launch tpu-vm` requested" in capsys.readouterr().err
    assert len(service.slices) == 1


def test_a_bucket_that_cannot_be_written_costs_nothing(service, capsys, monkeypatch):
    with storage({}, granted=["storage.objects.get"]) as host:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        assert launch() == 2
    assert "storage.objects.create" in capsys.readouterr().err
    assert not service.requests


@pytest.mark.parametrize(("answer", "rented"), [("y", True), ("", False), ("no", False)])
def test_it_asks_before_renting(service, capsys, monkeypatch, answer, rented):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    flags = [flag for flag in FLAGS if flag != "--yes"]
    assert main.main(["launch", "tpu-vm", *flags]) == (0 if rented else 2)
    assert bool(service.requests) == rented


def test_no_secret_leaves_this_machine(service, capsys, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    assert launch() == 0
    service.faults["create"] = [Fault(grpc.StatusCode.PERMISSION_DENIED, "denied")]
    assert launch() == 2
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err + repr(service.requests)
