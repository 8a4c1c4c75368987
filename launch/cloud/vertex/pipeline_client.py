"""Runs a pipeline on Vertex AI, once or on a schedule, with the SDK's own clients."""

from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, waiting
from tftpu.launch.cloud.google_cloud import ConnectionLost
from tftpu.launch.cloud.vertex.training_job import VertexJob as Training

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import PipelineServiceClient, ScheduleServiceClient

    from tftpu.launch.cloud.vertex.pipeline import Spec


OUTPUTS = "/pipelines"  # subfolder of the workdir to which Vertex AI Pipelines writes


class PipelineClients(NamedTuple):
    """The SDK's clients for the pipelines and the schedules of a region."""

    pipelines: "PipelineServiceClient"
    schedules: "ScheduleServiceClient"


def create_clients(region: str) -> PipelineClients:
    """Returns the SDK's clients for the pipelines and the schedules of a region."""
    from google.cloud import aiplatform_v1 as v1

    return PipelineClients(
        google_cloud.connect(v1.PipelineServiceClient, region),
        google_cloud.connect(v1.ScheduleServiceClient, region),
    )


def submit(given: PipelineClients, training: Training, created: "Spec", number: str) -> str:
    """Uploads the run's files, starts a run of a pipeline, and returns its resource name.

    Args:
        given: the SDK's clients.
        training: the training job, whose project pays and whose region is used.
        created: the PipelineJob.
        number: the unique ID of the run.

    Raises:
        UserError: the request was rejected, or it is unknown whether the pipeline runs.
    """
    from google.cloud import aiplatform_v1 as v1

    training.shipment.upload(training.workdir)
    name = f"{training.parent}/pipelineJobs/{number}"
    ending = explain_how_to_end(name)
    with waiting.creating(f"The pipeline may run, and incur costs. {ending}"):
        try:
            google_cloud.call(
                "creating the pipeline",
                given.pipelines.create_pipeline_job,
                parent=training.parent,
                pipeline_job=google_cloud.to_message(v1.PipelineJob, created),
                pipeline_job_id=number,
            )
        except ConnectionLost:
            if not _is_there(given, name):
                raise
    return name


def _is_there(given: PipelineClients, name: str) -> bool:
    try:
        google_cloud.call("looking for the pipeline", given.pipelines.get_pipeline_job, name=name)
    except (ConnectionLost, UserError):
        return False
    return True


def submit_schedule(given: PipelineClients, training: Training, created: "Spec", cron: str) -> str:
    """Uploads the run's files, creates a schedule of a pipeline, and returns its resource name.

    Args:
        given: the SDK's clients.
        training: the training job, whose project pays and whose region is used.
        created: the PipelineJob of each run.
        cron: the times of the runs, in the format of cron.

    Raises:
        UserError: the request was rejected, or no answer came.
    """
    from google.cloud import aiplatform_v1 as v1

    training.shipment.upload(training.workdir)
    wanted = {
        "displayName": created["displayName"],
        "cron": cron,
        # Two runs at a time would cost two slices, so no run starts while another one runs.
        "maxConcurrentRunCount": "1",
        "createPipelineJobRequest": {"parent": training.parent, "pipelineJob": created},
    }
    with waiting.creating(
        f"The schedule may exist, and start runs that cost: look for {created['displayName']} on "
        f"{_format_console_url(training.project, 'schedules')}, and delete it there."
    ):
        return google_cloud.call(
            "creating the schedule",
            given.schedules.create_schedule,
            parent=training.parent,
            schedule=google_cloud.to_message(v1.Schedule, wanted),
        ).name


def watch(given: PipelineClients, name: str) -> None:
    """Waits for the end of a pipeline; prints the states of its steps and the path of the export.

    After Ctrl-C the pipeline continues.

    Raises:
        UserError: the pipeline failed or was cancelled, or the service cannot be reached.
    """
    get, states = given.pipelines.get_pipeline_job, waiting.StateLog()
    again = f"`tftpu launch vertex-attach {name}` follows it again."
    with waiting.watching(f"The pipeline keeps running. {explain_how_to_end(name)} {again}"):
        for found in waiting.poll(
            lambda: google_cloud.call("watching the pipeline", get, name=name)
        ):
            for task in found.job_detail.task_details:
                states.print(task.state.name.lower(), task.task_name)
            state = found.state.name.removeprefix("PIPELINE_STATE_").lower()
            if state == "succeeded":
                workdir = found.runtime_config.gcs_output_directory.removesuffix(OUTPUTS)
                print(f"The export is in {resolve_run_folder(workdir, name)}/export")
                return
            if state in ("failed", "cancelled"):
                raise UserError(
                    f"The pipeline {state}: {_describe_failure(found)}. The log of each step "
                    f"gives the reason: {format_page_url(name)}"
                )


def resolve_run_folder(workdir: str, name: str) -> str:
    """Returns the folder of a pipeline run in a workdir, given the run's resource name."""
    return f"{workdir}/{name.rpartition('/')[2]}"


def _describe_failure(found: Any) -> str:
    """Returns why steps failed; if none did, why the pipeline failed."""
    reasons = [
        f"{task.task_name}: {task.error.message.strip().rstrip('.') or 'no reason was given'}"
        for task in found.job_detail.task_details
        if task.state.name == "FAILED"
    ]
    return "; ".join(reasons) or found.error.message.rstrip(".") or "no reason was given"


def format_page_url(name: str) -> str:
    """Returns the URL of a pipeline run in Google Cloud's console, given its resource name."""
    project, region, number = name.split("/")[1::2]
    return _format_console_url(project, f"locations/{region}/runs/{number}")


def _format_console_url(project: str, what: str) -> str:
    return f"https://console.cloud.google.com/vertex-ai/pipelines/{what}?project={project}"


def explain_how_to_end(name: str) -> str:
    """Returns a line with the name of a pipeline run and the console page that can cancel it."""
    return f"The run is {name}; {format_page_url(name)} shows and cancels it."


def explain_how_to_end_schedule(training: Training, name: str) -> str:
    """Returns a line with the name of a schedule and the console page that can delete it."""
    page = _format_console_url(training.project, "schedules")
    return f"The schedule is {name}; {page} shows, pauses and deletes it."
