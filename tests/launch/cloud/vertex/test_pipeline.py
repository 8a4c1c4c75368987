"""`tftpu launch vertex-pipeline` with the SDK's real clients against services on loopback."""

import contextlib
import io
import json
import re

import grpc
import pytest
import yaml
from google.cloud import aiplatform_v1 as v1
from google.cloud.aiplatform_v1.services.job_service import transports as job_transports
from google.cloud.aiplatform_v1.services.pipeline_service import transports as pipeline_transports
from google.cloud.aiplatform_v1.services.schedule_service import transports as schedule_transports
from google.protobuf import json_format

from tests.support.fakes.fake_google_cloud import SECRET, SECRETS, Fault, grpc_service, storage
from tests.support.fakes.rented_machine import RentedMachine
from tests.support.vertex_pipelines import FLAGS, SOURCE
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.vertex import pipeline_client

PARENT = "projects/p/locations/europe-west4"
pytest.importorskip("kfp", reason="not beside TensorFlow 2.19, which holds protobuf too low")
OWN = '''"""Digits, with a model of the user's."""
import dataclasses
import os
import tftpu
from tftpu.launch.configs import digits_resnet

print("config of", os.path.dirname(os.path.abspath(__file__)), "with", tftpu.__file__)


@dataclasses.dataclass
class Net(tftpu.ModelConfig):
    def build(self):
        from keras import Input, Sequential, layers

        return Sequential([Input((8, 8, 1)), layers.Flatten(), layers.Dense(10)])


def get_config():
    return dataclasses.replace(digits_resnet.get_config(), model=Net())
'''
PACKAGE = "google.cloud.aiplatform.v1"
State, Step = v1.PipelineState, v1.PipelineTaskDetail.State


def states(*steps: tuple[str, Step]) -> list[v1.PipelineTaskDetail]:
    return [v1.PipelineTaskDetail(task_name=name, state=state) for name, state in steps]


class Vertex:
    """Services that take a pipeline through given states."""

    def __init__(self):
        self.created, self.scheduled = [], []
        self.refuses = self.loses = None  # faults of a creation: without, and with its effect
        self.unreachable = 0  # number of unreachable requests after the creation
        begun, trained = ("check", Step.RUNNING), ("train", Step.RUNNING)
        ended = ("check", Step.SUCCEEDED), ("train", Step.SUCCEEDED)
        self.moments = [
            (State.PIPELINE_STATE_RUNNING, states(begun)),
            (State.PIPELINE_STATE_RUNNING, states(ended[0], trained)),
            (State.PIPELINE_STATE_SUCCEEDED, states(*ended)),
        ]

    def create(self, request):
        if self.refuses:
            raise self.refuses
        self.created.append(request)
        if self.loses:
            raise self.loses
        return v1.PipelineJob(name=f"{request.parent}/pipelineJobs/{request.pipeline_job_id}")

    def get(self, request):
        if self.unreachable:
            self.unreachable -= 1
            raise Fault(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
        names = [f"{PARENT}/pipelineJobs/{created.pipeline_job_id}" for created in self.created]
        if request.name not in names:
            raise Fault(grpc.StatusCode.NOT_FOUND, "there is none")
        state, tasks = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        detail = v1.PipelineJobDetail(task_details=tasks)
        runtime = self.created[names.index(request.name)].pipeline_job.runtime_config
        return v1.PipelineJob(
            name=request.name, state=state, job_detail=detail, runtime_config=runtime
        )

    def schedule(self, request):
        self.scheduled.append(request)
        if self.loses:
            raise self.loses
        return v1.Schedule(request.schedule, name=f"{PARENT}/schedules/5")


@pytest.fixture
def service(monkeypatch):
    fake = Vertex()
    fake.objects = {}
    pipelines = {
        "CreatePipelineJob": (fake.create, v1.CreatePipelineJobRequest, v1.PipelineJob),
        "GetPipelineJob": (fake.get, v1.GetPipelineJobRequest, v1.PipelineJob),
    }
    schedules = {"CreateSchedule": (fake.schedule, v1.CreateScheduleRequest, v1.Schedule)}
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc_service(f"{PACKAGE}.PipelineService", pipelines))
        other = stack.enter_context(grpc_service(f"{PACKAGE}.ScheduleService", schedules))
        clients = pipeline_client.PipelineClients(
            v1.PipelineServiceClient(
                transport=pipeline_transports.PipelineServiceGrpcTransport(channel=channel)
            ),
            v1.ScheduleServiceClient(
                transport=schedule_transports.ScheduleServiceGrpcTransport(channel=other)
            ),
        )
        monkeypatch.setattr(pipeline_client, "create_clients", lambda region: clients)
        host = stack.enter_context(storage(fake.objects))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "vertex-pipeline", *FLAGS, *flags])


def spec_of(job) -> dict:
    return json_format.MessageToDict(type(job).pb(job))["pipelineSpec"]


def payload_of(spec: dict, folder: str = "gs://b/digits/run-7") -> dict:
    """Returns the custom job that the training step asks Google's launcher for, in a folder."""
    arguments = spec["deploymentSpec"]["executors"]["exec-train"]["container"]["args"]
    parts = json.loads(arguments[arguments.index("--payload") + 1])["Concat"]
    named = "{{$.inputs.parameters['folder']}}"
    return json.loads("".join(folder if part == named else part for part in parts))


def without_names(spec: dict) -> dict:
    """Returns a pipeline without the display name of its custom job, which is new each time."""
    return json.loads(json.dumps(spec).replace(payload_of(spec)["display_name"], "NAME"))


@pytest.mark.medium
def test_a_pipeline_that_was_left_alone_is_followed_again(service, capsys):
    assert launch("--detach") == 0
    number = service.created[0].pipeline_job_id
    capsys.readouterr()
    assert main.main(["launch", "vertex-attach", f"{PARENT}/pipelineJobs/{number}"]) == 0
    said = capsys.readouterr().out
    assert "train running" in said
    assert said.endswith(f"The export is in gs://b/digits/{number}/export\n")


@pytest.mark.slow
def test_the_dry_run_prints_the_pipeline_that_is_sent(service, capsys):
    flags = "--spot", "--labels=team=vision", "--service_account=s@p.com", "--timeout=2h"
    assert launch(*flags, "--dry_run") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not service.created and not service.objects
    assert launch(*flags) == 0
    (request,) = service.created
    sent = request.pipeline_job
    assert request.parent == PARENT and request.pipeline_job_id.startswith("digits-resnet-")
    assert without_names(printed) == without_names(spec_of(sent))
    assert sent.runtime_config.gcs_output_directory == "gs://b/digits/pipelines"
    assert sent.service_account == "s@p.com" and dict(sent.labels)["team"] == "vision"
    assert any(name.endswith(".whl") for name in service.objects)


@pytest.mark.medium
def test_the_steps_follow_one_another_in_a_folder_of_their_own(service):
    assert launch(*SOURCE, "--predict=evaluation") == 0
    tasks = spec_of(service.created[0].pipeline_job)["root"]["dag"]["tasks"]
    before = {
        name: set(task.get("dependentTasks", [])) - {"new-run"} for name, task in tasks.items()
    }
    assert before == {
        "new-run": set(),
        "convert": set(),
        "check": {"convert"},
        "train": {"check"},
        "evaluate": {"train"},
        "gate": {"evaluate"},
        "export": {"gate"},
        "predict": {"gate"},
    }
    assert not any(task["cachingOptions"].get("enableCache") for task in tasks.values())
    # The job itself starts again after a preemption; repeated, it could cost several times.
    assert "retryPolicy" not in tasks["train"]

    def given(step: str) -> dict[str, str]:
        values = tasks[step]["inputs"]["parameters"]
        return {k: v["runtimeValue"]["constant"] for k, v in values.items() if "runtimeValue" in v}

    assert given("new-run")["workdir"] == "gs://b/digits"
    assert given("new-run")["run"] == "{{$.pipeline_job_name}}"
    run = "{{$.inputs.parameters['pipelinechannel--new-run-Output']}}"
    assert given("convert")["output"] == given("check")["data_dir"] == f"{run}/data"
    for step, parameter in ("train", "folder"), ("evaluate", "workdir"), ("export", "workdir"):
        found = tasks[step]["inputs"]["parameters"][parameter]["taskOutputParameter"]
        assert found["producerTask"] == "new-run"
    assert given("export")["output"] == f"{run}/export"
    assert given("predict")["output"] == f"{run}/predictions"


@pytest.mark.medium
def test_googles_client_creates_the_custom_job_of_the_training():
    """Google's launcher hands the payload to this method of this client."""
    asked = []

    def create(request):
        asked.append(request.custom_job)
        return request.custom_job

    methods = {"CreateCustomJob": (create, v1.CreateCustomJobRequest, v1.CustomJob)}
    with grpc_service(f"{PACKAGE}.JobService", methods) as channel:
        client = v1.JobServiceClient(
            transport=job_transports.JobServiceGrpcTransport(channel=channel)
        )
        spec = compiled("--spot", *SOURCE, "--config.train.steps=7")
        client.create_custom_job(parent=PARENT, custom_job=payload_of(spec))
    (job,) = asked
    (pool,) = job.job_spec.worker_pool_specs
    assert pool.machine_spec.machine_type == "ct5lp-hightpu-4t"
    assert pool.machine_spec.tpu_topology == "2x2"
    assert job.job_spec.scheduling.restart_job_on_worker_restart
    assert job.job_spec.scheduling.strategy == v1.Scheduling.Strategy.SPOT
    assert job.job_spec.scheduling.timeout.days == 7
    run = "gs://b/digits/run-7"
    script = pool.container_spec.command[-1]
    words = script.partition("arguments=(")[2].partition(")")[0]
    assert words.startswith("train --config=resnet50_imagenet --config.data.global_batch_size=128 ")
    assert f" --config.train.steps=7 --config.data.data_dir={run}/data --workdir={run} " in words


def compiled(*flags: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert launch(*flags, "--dry_run") == 0
    return yaml.safe_load(text.getvalue())


@pytest.mark.slow
def test_steps_install_what_travels_and_run_the_users_code(service, tmp_path, monkeypatch, capfd):
    """The steps' own functions, in this process: the local runner rewrites `python3` in scripts."""
    from kfp import dsl

    from tftpu.launch.kfp import steps

    (tmp_path / "mine").mkdir()
    config = tmp_path / "mine" / "digits.py"
    config.write_text(OWN)
    assert launch(f"--config={config}") == 0
    spec = spec_of(service.created[0].pipeline_job)
    setup = spec["root"]["inputDefinitions"]["parameters"]["setup"]["defaultValue"]
    (tmp_path / "machine").mkdir()
    machine = RentedMachine(tmp_path / "machine")
    machine.installing()
    for name, data in service.objects.items():
        machine.put(f"gs://{name.rpartition('/')[0]}", {name.rpartition("/")[2]: data})
    monkeypatch.setenv("PATH", f"{machine.bin}:/usr/bin:/bin")
    monkeypatch.setenv("TFTPU_HOME", str(machine.home))
    monkeypatch.setenv("TFTPU_GCS", str(machine.bucket))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    run, found = str(tmp_path / "run"), dsl.Metrics(uri=str(tmp_path / "metrics"))
    words = {"config": "digits.py", "overrides": "--config.train.steps=2", "setup": setup}
    model = dsl.Model(uri=str(tmp_path / "model"))
    steps.train.python_func(workdir=run, run=model, **words)
    steps.evaluate.python_func(workdir=run, metrics=found, setup=setup)
    assert found.metadata["step"] == 2 and 0 <= found.metadata["accuracy"] <= 1
    home = re.escape(str(machine.home))
    assert re.search(f"config of {home}/code/mine with {home}/venv/", capfd.readouterr().out)


@pytest.mark.medium
def test_it_names_the_run_and_follows_its_steps_to_the_end(service, capsys):
    assert launch() == 0
    said = capsys.readouterr().out
    number = service.created[0].pipeline_job_id
    assert f"/runs/{number}?project=p shows and cancels it." in said
    steps = [line.split()[1:] for line in said.splitlines() if line[2:3] == ":"]
    assert steps == [
        ["check", "running"],
        ["check", "succeeded"],
        ["train", "running"],
        ["train", "succeeded"],
    ]
    assert f"The export is in gs://b/digits/{number}/export" in said


@pytest.mark.medium
def test_with_detach_it_returns_at_once(service, capsys):
    assert launch("--detach") == 0
    assert len(service.moments) == 3
    assert "shows and cancels it" in capsys.readouterr().out


@pytest.mark.medium
def test_a_schedule_starts_the_same_pipeline(service, capsys):
    assert launch("--cron=TZ=Europe/Berlin 0 3 * * 1") == 0
    assert not service.created
    (request,) = service.scheduled
    wanted = request.schedule
    assert (wanted.cron, wanted.max_concurrent_run_count) == ("TZ=Europe/Berlin 0 3 * * 1", 1)
    each = wanted.create_pipeline_job_request
    assert each.parent == PARENT and not each.pipeline_job_id  # the service names each run
    assert without_names(spec_of(each.pipeline_job)) == without_names(compiled())
    assert any(name.endswith(".whl") for name in service.objects)
    said = capsys.readouterr().out
    assert f"The schedule is {PARENT}/schedules/5; " in said and "pauses and deletes it" in said


@pytest.mark.medium
def test_a_pipeline_that_fails_names_the_steps_and_the_place_of_their_logs(service, capsys):
    failed = v1.PipelineTaskDetail(
        task_name="gate", state=Step.FAILED, error={"message": "The replica exited with 1."}
    )
    service.moments = [(State.PIPELINE_STATE_FAILED, [failed])]
    assert launch() == 2
    error = capsys.readouterr().err
    assert "The pipeline failed: gate: The replica exited with 1. The log of each" in error
    assert "console.cloud.google.com/vertex-ai/pipelines/locations/europe-west4/runs/" in error


LOST = Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.mark.medium
def test_a_lost_answer_does_not_lose_the_pipeline(service, capsys):
    service.loses = LOST
    assert launch() == 0
    assert len(service.created) == 1  # and it is not requested twice


@pytest.mark.medium
def test_a_lost_connection_names_the_pipeline_that_may_run(service, capsys):
    service.loses, service.unreachable = LOST, 10**6
    assert launch() == 2
    error = capsys.readouterr().err
    assert "The pipeline may run, and incur costs." in error
    assert f"/runs/{service.created[0].pipeline_job_id}?project=p" in error


@pytest.mark.slow
def test_it_outlasts_a_connection_that_comes_back_and_gives_up_on_one_that_does_not(
    service, capsys, monkeypatch
):
    service.unreachable = 3
    assert launch() == 0
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    service.unreachable = 10**6
    assert launch() == 2
    assert "The pipeline keeps running. It is" in capsys.readouterr().err


@pytest.mark.medium
def test_a_lost_schedule_says_where_to_look(service, capsys):
    service.loses = LOST
    assert launch("--cron=0 3 * * *") == 2
    assert "look for digits-resnet on https://console" in capsys.readouterr().err


@pytest.mark.medium
def test_a_refusal_is_one_clear_line(service, capsys):
    denied = "Permission 'aiplatform.pipelineJobs.create' denied"
    service.refuses = Fault(grpc.StatusCode.PERMISSION_DENIED, denied)
    assert launch() == 2
    error = capsys.readouterr().err
    assert denied in error and error.count("\n") == 1


@pytest.mark.slow
def test_no_secret_leaves_this_machine(service, capsys, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    assert launch() == 0
    assert launch("--cron=0 3 * * *") == 0
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err
    assert SECRET not in repr(service.created) + repr(service.scheduled)
