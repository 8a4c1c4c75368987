"""Runs a pipeline on Vertex AI, once or by a schedule, with the SDK's own clients."""

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.google_cloud import ConnectionLost
from tftpu.launch.cloud.vertex import client
from tftpu.launch.cloud.vertex.pipeline import Spec
from tftpu.launch.cloud.vertex.training_job import VertexJob as Training

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import PipelineServiceClient, ScheduleServiceClient

_ENDED = ("FAILED", "CANCELLED")


class PipelineClients(NamedTuple):
    """The SDK's clients for a region."""

    pipelines: "PipelineServiceClient"
    schedules: "ScheduleServiceClient"


def create_clients(region: str) -> PipelineClients:
    """Returns the SDK's clients for a region."""
    from google.cloud import aiplatform_v1 as v1

    options = {"api_endpoint": f"{region}-aiplatform.googleapis.com"}
    what = "finding credentials"
    return PipelineClients(
        google_cloud.call(what, v1.PipelineServiceClient, client_options=options),
        google_cloud.call(what, v1.ScheduleServiceClient, client_options=options),
    )


def submit(given: PipelineClients, training: Training, created: Spec, number: str) -> str:
    """Uploads what travels, starts a run of a pipeline, and returns its resource name.

    Args:
        given: the SDK's clients.
        training: who pays, and where it runs.
        created: the PipelineJob.
        number: name of the run, which no other one has.

    Raises:
        UserError: the request was rejected, or it is not known whether the pipeline runs.
    """
    from google.cloud import aiplatform_v1 as v1

    training.shipment.upload(training.base_folder)
    name = f"{training.parent}/pipelineJobs/{number}"
    request = {"parent": training.parent, "pipeline_job_id": number}
    try:
        google_cloud.call(
            "creating the pipeline",
            given.pipelines.create_pipeline_job,
            pipeline_job=_to_message(v1.PipelineJob, created),
            **request,
        )
    except (ConnectionLost, KeyboardInterrupt) as error:
        why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
        if isinstance(error, ConnectionLost) and _is_there(given, name):
            return name
        raise UserError(
            f"{why} The pipeline may run, and incur costs. {explain_how_to_end(training, name)}"
        ) from error
    return name


def _is_there(given: PipelineClients, name: str) -> bool:
    try:
        google_cloud.call("looking for it", given.pipelines.get_pipeline_job, name=name)
    except (ConnectionLost, UserError):
        return False
    return True


def submit_schedule(given: PipelineClients, training: Training, created: Spec, cron: str) -> str:
    """Uploads what travels, creates a schedule of a pipeline, and returns its resource name.

    Args:
        given: the SDK's clients.
        training: who pays, and where it runs.
        created: the PipelineJob of each run.
        cron: when it runs.

    Raises:
        UserError: the request was rejected, or no answer came.
    """
    from google.cloud import aiplatform_v1 as v1

    training.shipment.upload(training.base_folder)
    wanted = {
        "displayName": created["displayName"],
        "cron": cron,
        # Two at a time would pay for two slices; a run that is late is left out.
        "maxConcurrentRunCount": "1",
        "createPipelineJobRequest": {"parent": training.parent, "pipelineJob": created},
    }
    try:
        answer = google_cloud.call(
            "creating the schedule",
            given.schedules.create_schedule,
            parent=training.parent,
            schedule=_to_message(v1.Schedule, wanted),
        )
    except (ConnectionLost, KeyboardInterrupt) as error:
        why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
        raise UserError(
            f"{why} The schedule may exist, and start runs that cost: look for "
            f"{created['displayName']} on {_format_console_url(training, 'schedules')}, and "
            "delete it there."
        ) from error
    return answer.name


def watch(given: PipelineClients, training: Training, name: str) -> None:
    """Waits for the end of a pipeline; prints the states of its steps.

    Raises:
        UserError: it failed, was cancelled, or cannot be reached.
    """
    seen: dict[str, str] = {}
    lost_since = None
    while True:
        try:
            found = google_cloud.call(
                "watching the pipeline", given.pipelines.get_pipeline_job, name=name
            )
        except ConnectionLost as lost:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > client.PATIENCE_S:
                raise UserError(
                    f"{lost} The pipeline keeps running. {explain_how_to_end(training, name)}"
                ) from lost
            time.sleep(client.POLL_S)
            continue
        lost_since = None
        for task in found.job_detail.task_details:
            state = task.state.name.lower()
            if seen.get(task.task_name) != state:
                seen[task.task_name] = state
                print(f"{time.strftime('%H:%M:%S')}  {task.task_name} {state}", flush=True)
        state = found.state.name.removeprefix("PIPELINE_STATE_")
        if state == "SUCCEEDED":
            return
        if state in _ENDED:
            raise UserError(
                f"The pipeline {state.lower()}: {_describe_failure(found)}. The log of each step, "
                "with its "
                f"reason: {format_page_url(training, name)}"
            )
        time.sleep(client.POLL_S)


def _describe_failure(found: Any) -> str:
    """Returns the reasons of the steps that failed, or the pipeline's own."""
    reasons = [
        f"{task.task_name}: {task.error.message.strip().rstrip('.') or 'no reason was given'}"
        for task in found.job_detail.task_details
        if task.state.name == "FAILED"
    ]
    return "; ".join(reasons) or found.error.message.rstrip(".") or "no reason was given"


def format_page_url(training: Training, name: str) -> str:
    """Returns the address of a run in the console."""
    return _format_console_url(
        training, f"locations/{training.region}/runs/{name.rpartition('/')[2]}"
    )


def _format_console_url(training: Training, what: str) -> str:
    console = "https://console.cloud.google.com/vertex-ai/pipelines"
    return f"{console}/{what}?project={training.project}"


def explain_how_to_end(training: Training, name: str) -> str:
    """Returns a line with the name of a run and the place that ends it; `gcloud` has no command."""
    return f"It is {name}; {format_page_url(training, name)} shows and cancels it."


def explain_how_to_end_schedule(training: Training, name: str) -> str:
    """Returns a line with the name of a schedule and the place that ends it."""
    return (
        f"It is {name}; {_format_console_url(training, 'schedules')} shows, pauses and deletes it."
    )


def _to_message(kind: Any, spec: Spec) -> Any:
    from google.protobuf import json_format

    return kind(json_format.ParseDict(spec, kind.pb(kind()), ignore_unknown_fields=False))
