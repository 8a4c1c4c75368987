"""`tftpu launch vertex-search` with the SDK's real client against a service on loopback."""

import grpc
import pytest
import yaml
from google.cloud import aiplatform_v1 as v1
from google.cloud.aiplatform_v1.services.job_service import transports
from google.protobuf import json_format

from tests.support.fakes.fake_google_cloud import Fault, grpc_service, storage
from tests.support.interrupts import interrupt_waiting
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.vertex import client as vertex_client
from tftpu.launch.settings import config_flags

PARENT = "projects/p/locations/europe-west4"
NAME = f"{PARENT}/hyperparameterTuningJobs/123"
FLAGS = (
    *("--config=digits_resnet", "--slice=v5e-1", "--project=p", "--workdir=gs://b/s"),
    *("--region=europe-west4", "--metric=accuracy", "--trials=3", "--parallel=2"),
    *("--space=optimizer.learning_rate=log:1e-3..1", "--space=model.width=choice:8,16"),
    *("--space=train.on_nan=choice:stop,rollback", "--config.train.steps=500"),
)
State, TrialState = v1.JobState, v1.Trial.State
VALUES = {
    "1": (0.5, 0.25, 8, "stop"),
    "2": (0.75, 0.125, 16, "rollback"),
    "3": (None, 1, 8, "stop"),
}


def trial(number: str, ended: bool) -> v1.Trial:
    """Returns a trial as the service describes it: numbers are floats, whatever their type."""
    value, rate, width, on_nan = VALUES[number]
    chosen = {"optimizer.learning_rate": rate, "model.width": width, "train.on_nan": on_nan}
    found = {
        "id": number,
        "state": "ACTIVE" if not ended else "INFEASIBLE" if value is None else "SUCCEEDED",
        "parameters": [{"parameterId": f"config.{k}", "value": v} for k, v in chosen.items()],
    }
    if ended and value is not None:
        found["finalMeasurement"] = {"metrics": [{"metricId": "accuracy", "value": value}]}
    return v1.Trial(json_format.ParseDict(found, v1.Trial.pb(v1.Trial())))


class Vertex:
    """A service that carries out the trials of a job, one between two looks."""

    def __init__(self):
        self.created = []
        self.states = [State.JOB_STATE_QUEUED, *[State.JOB_STATE_RUNNING] * 3]
        self.last = State.JOB_STATE_SUCCEEDED
        self.refuses = None  # the creation
        self.loses_answer = False  # to the creation, which succeeds nevertheless
        self.ended = 0  # trials
        self.foreign = False  # whether something else than tftpu made the job

    def create(self, request):
        if self.refuses:
            raise self.refuses
        self.created.append(request)
        if self.loses_answer:
            raise Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return self._job(self.states[0])

    def get(self, request):
        if request.name != NAME or not self.created:
            raise Fault(grpc.StatusCode.NOT_FOUND, "The job does not exist.")
        if self.states:
            return self._job(self.states.pop(0))
        self.ended = min(3, self.ended + 1)
        return self._job(self.last if self.ended == 3 else State.JOB_STATE_RUNNING)

    def list(self, request):
        names = [r.hyperparameter_tuning_job.display_name for r in self.created]
        found = [n for n in names if request.filter == f'display_name="{n}"']
        jobs = [v1.HyperparameterTuningJob(name=NAME, display_name=n) for n in found]
        return v1.ListHyperparameterTuningJobsResponse(hyperparameter_tuning_jobs=jobs)

    def _job(self, state):
        job = v1.HyperparameterTuningJob(self.created[-1].hyperparameter_tuning_job)
        job.name, job.state = NAME, state
        job.trials = [trial(n, int(n) <= self.ended) for n in VALUES if int(n) <= self.ended + 1]
        if self.foreign:
            del job.trial_job_spec.worker_pool_specs[0].container_spec.env[:]
        job.error = {"message": "Too many trials failed"} if state == State.JOB_STATE_FAILED else {}
        return job


@pytest.fixture
def service(monkeypatch):
    fake, kind = Vertex(), v1.HyperparameterTuningJob
    methods = {
        f"Create{kind.__name__}": (fake.create, v1.CreateHyperparameterTuningJobRequest, kind),
        f"Get{kind.__name__}": (fake.get, v1.GetHyperparameterTuningJobRequest, kind),
        f"List{kind.__name__}s": (
            fake.list,
            v1.ListHyperparameterTuningJobsRequest,
            v1.ListHyperparameterTuningJobsResponse,
        ),
    }
    fake.objects = {}
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    with grpc_service("google.cloud.aiplatform.v1.JobService", methods) as channel:
        transport = transports.JobServiceGrpcTransport(channel=channel)
        client = v1.JobServiceClient(transport=transport)
        monkeypatch.setattr(vertex_client, "create_client", lambda region: client)
        with storage(fake.objects) as host:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
            yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "vertex-search", *FLAGS, *flags])


def test_the_dry_run_prints_the_request_that_is_sent(service, capsys):
    assert launch("--dry_run", "--pruner=median") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not service.created
    assert launch("--pruner=median", "--detach") == 0
    (request,) = service.created
    assert request.parent == PARENT
    sent = request.hyperparameter_tuning_job
    assert sent.display_name.startswith("digits-resnet-")
    assert dict(sent.labels)["slice"] == "v5e-1"
    folder = sent.trial_job_spec.base_output_directory.output_uri_prefix
    assert folder == f"gs://b/s/{sent.display_name}"
    expected = v1.HyperparameterTuningJob(
        json_format.ParseDict(printed, v1.HyperparameterTuningJob.pb(v1.HyperparameterTuningJob()))
    )
    expected.trial_job_spec.base_output_directory.output_uri_prefix = folder
    assert sent.study_spec == expected.study_spec
    assert sent.trial_job_spec == expected.trial_job_spec
    assert (sent.max_trial_count, sent.parallel_trial_count) == (3, 2)
    assert any(name.endswith(".whl") for name in service.objects)  # what the trials install


def best_command(said: str) -> list[str]:
    return said.partition("The best one again:\n")[2].splitlines()[0].split()


def test_it_shows_the_trials_as_they_end_and_the_best_one_as_a_command(service, capsys):
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"`gcloud ai hp-tuning-jobs cancel {NAME}` ends it" in said
    assert "/locations/europe-west4/training/123?project=p" in said
    assert [line.split()[1] for line in said.splitlines() if line[2:3] == ":"] == [
        *("queued", "running", "succeeded")
    ]
    shown, _, best = said.partition("2 trials of 3 with a result:\n")
    rows = [line.split()[:4] for line in shown.splitlines() if line.startswith("  trial")]
    assert rows == [
        ["trial", "1", "accuracy", "0.5000"],
        ["trial", "2", "accuracy", "0.7500"],
        ["trial", "3", "no", "result"],
    ]
    assert [line.split()[1] for line in best.splitlines()[:2]] == ["2", "1"]
    program, command, config, *words = best_command(said)
    assert (program, command, config) == ("tftpu", "train", "--config=digits_resnet")
    experiment = config_flags.load("digits_resnet", words)
    assert experiment.optimizer.learning_rate == 0.125
    assert (experiment.model.width, experiment.train.on_nan) == (16, "rollback")
    assert (experiment.train.steps, experiment.train.best_metric) == (500, "accuracy")
    assert experiment.train.writers == ()


def test_for_a_loss_the_lowest_is_the_best(service, capsys):
    assert launch("--metric=loss") == 0
    assert "--config.optimizer.learning_rate=0.25" in best_command(capsys.readouterr().out)


def test_a_job_that_was_left_alone_is_followed_again(service, capsys):
    assert launch("--detach") == 0
    said = capsys.readouterr().out
    follow = next(line for line in said.splitlines() if "vertex-attach" in line)
    assert len(service.states) == 4  # nobody has waited
    assert main.main(follow.partition("tftpu ")[2].split()) == 0
    said = capsys.readouterr().out
    assert best_command(said)[:3] == ["tftpu", "train", "--config=digits_resnet"]
    assert "--config.optimizer.learning_rate=0.125" in best_command(said)


def test_a_search_of_something_else_has_no_command_that_trains(service, capsys):
    assert launch("--detach") == 0
    service.foreign = True
    assert main.main(["launch", "vertex-attach", NAME]) == 2
    assert "is not a search that `tftpu launch vertex-search` started" in capsys.readouterr().err


def test_a_job_that_fails_says_why_and_shows_the_trials_that_ended(service, capsys):
    service.last = State.JOB_STATE_FAILED
    assert launch() == 2
    captured = capsys.readouterr()
    assert "The job failed: Too many trials failed." in captured.err
    assert f"gcloud ai hp-tuning-jobs stream-logs {NAME}" in captured.err
    assert "--config.optimizer.learning_rate=0.125" in best_command(captured.out)


def test_an_interrupt_leaves_the_job_running_and_says_how_to_follow_it(
    service, capsys, monkeypatch
):
    interrupt_waiting(monkeypatch)
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"The job keeps running. The job is {NAME}" in said
    assert f"tftpu launch vertex-attach {NAME}" in said


@pytest.mark.parametrize(
    ("code", "message", "says"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "The following quota metrics exceed quota limits: custom_model_training_tpu_v5e",
            "quota is exceeded",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "Permission 'aiplatform.hyperparameterTuningJobs.create' denied",
            "aiplatform.hyperparameterTuningJobs.create",
        ),
        (grpc.StatusCode.UNAUTHENTICATED, "invalid credentials", "application-default login"),
        (grpc.StatusCode.INVALID_ARGUMENT, "Parameter is not valid", "not valid"),
    ],
)
def test_a_rejected_job_fails_with_one_clear_line(service, capsys, code, message, says):
    service.refuses = Fault(code, message)
    assert launch() == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_lost_answer_does_not_lose_the_job(service, capsys):
    service.loses_answer = True
    assert launch("--detach") == 0
    assert len(service.created) == 1  # and it is not requested twice
    assert f"hp-tuning-jobs cancel {NAME}" in capsys.readouterr().out


def test_a_request_that_never_arrived_is_not_called_a_job(service, capsys):
    service.refuses = Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert launch() == 2
    error = capsys.readouterr().err
    assert "There is no job digits-resnet-" in error and "gcloud ai hp-tuning-jobs list" in error


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digits-1124-abcdef", "is not the resource name of a job"),
        (f"{PARENT}/datasets/1", "is not the resource name of a job"),
        (f"{PARENT}/hyperparameterTuningJobs/9", "The job does not exist"),
    ],
)
def test_a_job_that_there_is_not_cannot_be_followed(service, capsys, name, says):
    assert main.main(["launch", "vertex-attach", name]) == 2
    assert says in capsys.readouterr().err
