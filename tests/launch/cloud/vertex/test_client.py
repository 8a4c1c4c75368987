"""`tftpu launch vertex` with the SDK's real client against a service on loopback."""

import grpc
import pytest
import yaml
from google.cloud import aiplatform_v1 as v1
from google.cloud.aiplatform_v1.services.job_service import transports
from google.protobuf import json_format

from tests.support.fakes.fake_google_cloud import SECRET, SECRETS, Fault, grpc_service, storage
from tests.support.interrupts import interrupt_waiting
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.vertex import client as vertex_client

FLAGS = (
    *("--config=digits_resnet", "--slice=v3-8", "--project=p", "--workdir=gs://b/run"),
    *("--region=europe-west4", "--image=eu.gcr.io/p/i:1"),
)
NAME = "projects/p/locations/europe-west4/customJobs/123"
State = v1.JobState


class Vertex:
    """A service that takes a job through given states and loses configured answers."""

    def __init__(self):
        self.created = []
        self.states = [State.JOB_STATE_QUEUED, State.JOB_STATE_RUNNING, State.JOB_STATE_SUCCEEDED]
        self.refuses = None  # the creation
        self.loses_answer = False  # to the creation, which succeeds nevertheless
        self.unreachable = 0  # number of unreachable requests after the creation
        self.error = ""

    def create(self, request):
        if self.refuses:
            raise self.refuses
        self.created.append(request)
        if self.loses_answer:
            raise Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return v1.CustomJob(request.custom_job, name=NAME, state=self.states[0])

    def get(self, request):
        self._reach()
        assert request.name == NAME
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        sent = self.created[-1].custom_job if self.created else v1.CustomJob()
        return v1.CustomJob(sent, name=NAME, state=state, error={"message": self.error})

    def list(self, request):
        self._reach()
        names = [r.custom_job.display_name for r in self.created]
        found = [n for n in names if request.filter == f'display_name="{n}"']
        jobs = [v1.CustomJob(name=NAME, display_name=n) for n in found]
        return v1.ListCustomJobsResponse(custom_jobs=jobs)

    def _reach(self):
        if self.unreachable:
            self.unreachable -= 1
            raise Fault(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")


@pytest.fixture
def service(monkeypatch):
    fake = Vertex()
    methods = {
        "CreateCustomJob": (fake.create, v1.CreateCustomJobRequest, v1.CustomJob),
        "GetCustomJob": (fake.get, v1.GetCustomJobRequest, v1.CustomJob),
        "ListCustomJobs": (fake.list, v1.ListCustomJobsRequest, v1.ListCustomJobsResponse),
    }
    objects = {}
    fake.objects = objects
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    with grpc_service("google.cloud.aiplatform.v1.JobService", methods) as channel:
        transport = transports.JobServiceGrpcTransport(channel=channel)
        client = v1.JobServiceClient(transport=transport)
        monkeypatch.setattr(vertex_client, "create_client", lambda region: client)
        with storage(objects) as host:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
            yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "vertex", *FLAGS, *flags])


def test_the_dry_run_prints_the_request_that_is_sent(service, capsys):
    assert launch("--dry_run", "--spot", "--labels=team=vision") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not service.created
    assert launch("--spot", "--labels=team=vision") == 0
    (request,) = service.created
    assert request.parent == "projects/p/locations/europe-west4"
    sent = request.custom_job
    assert dict(sent.labels)["team"] == "vision"
    assert sent.display_name.startswith("digits-resnet-")
    expected = json_format.ParseDict(printed, v1.CustomJobSpec.pb(v1.CustomJobSpec()))
    assert v1.CustomJobSpec.pb(sent.job_spec) == expected
    machine = sent.job_spec.worker_pool_specs[0].machine_spec
    assert machine.accelerator_type == v1.AcceleratorType.TPU_V3
    assert (machine.machine_type, machine.accelerator_count) == ("cloud-tpu", 8)


def test_it_names_the_job_and_waits_for_its_end(service, capsys):
    service.objects["b/run/metrics.jsonl"] = b'{"step": 60}\n{"step": 120}\n{"torn'
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"gcloud ai custom-jobs cancel {NAME}" in said
    assert [line.split()[1] for line in said.splitlines() if line[2:3] == ":"] == [
        "queued",
        "running",
        "succeeded",
    ]
    assert said.count('{"step": 60}\n{"step": 120}\n') == 1
    assert "torn" not in said


def test_a_run_that_was_left_alone_is_followed_again(service, capsys):
    assert launch("--detach") == 0
    service.objects["b/run/metrics.jsonl"] = b'{"step": 60}\n'
    capsys.readouterr()
    assert main.main(["launch", "vertex-attach", NAME]) == 0
    assert '{"step": 60}' in capsys.readouterr().out


def test_a_job_of_something_else_is_not_followed(service, capsys):
    assert main.main(["launch", "vertex-attach", NAME]) == 2
    assert "is not a job that `tftpu launch vertex` started" in capsys.readouterr().err


def test_with_detach_it_returns_at_once(service, capsys):
    assert launch("--detach") == 0
    assert len(service.states) == 3
    assert f"cancel {NAME}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message", "says"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "The following quota metrics exceed quota limits: custom_model_training_tpu_v3",
            "quota is exceeded",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "Permission 'aiplatform.customJobs.create' denied",
            "aiplatform.customJobs.create",
        ),
        (grpc.StatusCode.UNAUTHENTICATED, "invalid credentials", "application-default login"),
        (grpc.StatusCode.INVALID_ARGUMENT, "Machine type is not supported", "not supported"),
        (grpc.StatusCode.NOT_FOUND, "The image does not exist", "does not exist"),
    ],
)
def test_a_rejected_job_fails_with_one_clear_line(service, capsys, code, message, says):
    service.refuses = Fault(code, message)
    assert launch() == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_lost_answer_does_not_lose_the_job(service, capsys):
    service.loses_answer = True
    assert launch() == 0
    assert len(service.created) == 1  # and it is not requested twice
    assert f"cancel {NAME}" in capsys.readouterr().out


def test_a_lost_connection_names_the_job_that_may_run(service, capsys, monkeypatch):
    service.loses_answer = True
    service.unreachable = 10**6
    assert launch() == 2
    error = capsys.readouterr().err
    name = service.created[0].custom_job.display_name
    assert f"The job {name} may run, and incur costs." in error
    assert "gcloud ai custom-jobs cancel NAME --region=europe-west4" in error


def test_a_request_that_never_arrived_is_not_called_a_job(service, capsys):
    service.refuses = Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert launch() == 2
    assert "There is no job digits-resnet-" in capsys.readouterr().err


def test_it_outlasts_a_connection_that_comes_back(service, capsys):
    service.unreachable = 3
    assert launch() == 0
    assert "succeeded" in capsys.readouterr().out


def test_it_gives_up_watching_and_says_that_the_job_keeps_running(service, capsys, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    service.unreachable = 10**6
    assert launch() == 2
    assert f"The job keeps running. The job is {NAME}" in capsys.readouterr().err


def test_a_job_that_fails_says_why(service, capsys):
    service.states = [State.JOB_STATE_RUNNING, State.JOB_STATE_FAILED]
    service.error = "The replica workerpool0-0 exited with a non-zero status of 2"
    assert launch() == 2
    error = capsys.readouterr().err
    assert "The job failed: The replica workerpool0-0 exited" in error
    assert f"stream-logs {NAME}" in error


def test_an_interrupt_leaves_the_job_running_and_says_so(service, capsys, monkeypatch):
    interrupt_waiting(monkeypatch)
    assert launch() == 0
    assert f"The job keeps running. The job is {NAME}" in capsys.readouterr().out


def test_an_interrupt_during_the_request_names_the_job(service, capsys, monkeypatch):
    client = vertex_client.create_client("")

    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "create_custom_job", interrupt)
    assert launch() == 2
    assert "may run, and incur costs" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--project", "--workdir"])
def test_required_flags_of_a_job(service, capsys, monkeypatch, missing):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    flags = [flag for flag in FLAGS if not flag.startswith(missing)]
    assert main.main(["launch", "vertex", *flags]) == 2
    assert f"{missing}=" in capsys.readouterr().err
    assert not service.created


def test_without_credentials_it_says_how_to_log_in(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    assert launch() == 2
    assert "gcloud auth application-default login" in capsys.readouterr().err


@pytest.mark.medium
def test_no_secret_leaves_this_machine(service, capsys, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    assert launch() == 0
    service.refuses = Fault(grpc.StatusCode.PERMISSION_DENIED, "denied")
    assert launch() == 2
    assert main.main(["launch", "vertex", *FLAGS, "--dry_run"]) == 0
    captured = capsys.readouterr()
    assert len(service.created) == 1
    assert SECRET not in captured.out + captured.err + repr(service.created)
