"""Follows a job of Vertex AI to its end: a run's metrics, a search's trials, a pipeline's steps."""

import re
from typing import TYPE_CHECKING, Any

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.vertex import client as vertex_client
from tftpu.launch.cloud.vertex import pipeline_client, trials
from tftpu.launch.cloud.vertex.client import CUSTOM, TUNING

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import CustomJob, HyperparameterTuningJob, JobServiceClient


def follow_run(client: "JobServiceClient", name: str) -> None:
    """Prints the states of a run's job, and its metrics as they are written.

    Args:
        client: the SDK's client.
        name: resource name of the job.

    Raises:
        UserError: the job failed, was cancelled, cannot be reached, or is not a run of tftpu.
    """
    folders: list[google_cloud.BucketFolder] = []

    def show(job: "CustomJob") -> None:
        if not folders:
            folders.append(google_cloud.BucketFolder(_find_run_folder(job, name)))
        folders[0].print_new("metrics.jsonl")

    again = f" `{_format_attach_command(name)}` follows it again."
    vertex_client.watch(client, CUSTOM, name, show, again)


def _find_run_folder(job: "CustomJob", name: str) -> str:
    """Returns the workdir of the run that a job's command trains.

    Raises:
        UserError: the job was not started by `tftpu launch vertex`.
    """
    pools = job.job_spec.worker_pool_specs
    command = " ".join(pools[0].container_spec.command) if pools else ""
    found = re.search(r"--workdir=(gs://[^\s']+)", command)
    if found is None:
        raise UserError(f"{name} is not a job that `tftpu launch vertex` started.")
    return found[1]


def follow_search(client: "JobServiceClient", name: str) -> None:
    """Prints each trial of a job when it ends, and the best trials when the watching ends.

    Args:
        client: the SDK's client.
        name: resource name of the job.

    Raises:
        UserError: the job failed, was cancelled, or cannot be reached.
    """
    shown: set[str] = set()
    seen: list[HyperparameterTuningJob] = []  # the newest state of the job

    def show(job: "HyperparameterTuningJob") -> None:
        for number, row in trials.format_ended(job).items():
            if number not in shown:
                shown.add(number)
                print(row, flush=True)
        seen[:] = [job]

    again = f" `{_format_attach_command(name)}` follows it again, and shows its best trials."
    try:
        vertex_client.watch(client, TUNING, name, show, again)
    finally:  # runs also for a job that failed after some trials
        for job in seen:
            print(trials.report(job), flush=True)


def format_page_url(name: str) -> str:
    """Returns the address of a job's page in the console, in the form that the SDK prints."""
    project, region, number = name.split("/")[1::2]
    console = "https://console.cloud.google.com/agent-platform"
    return f"{console}/locations/{region}/training/{number}?project={project}"


def explain_how_to_follow(name: str) -> str:
    """Returns a line with the command that shows the best trials of a job."""
    return f"Its best trials:     {_format_attach_command(name)}"


def _format_attach_command(name: str) -> str:
    return f"tftpu launch vertex-attach {name}"


def attach(name: str) -> None:
    """Follows a run, a search or a pipeline that was started before.

    Args:
        name: resource name of the job.

    Raises:
        UserError: the name belongs to no such job, the job failed, or it cannot be reached.
    """
    jobs: dict[str, Any] = {"customJobs": follow_run, "hyperparameterTuningJobs": follow_search}
    found = re.fullmatch(r"projects/[^/]+/locations/([^/]+)/([^/]+)/[^/]+", name)
    if found and found[2] in jobs:
        jobs[found[2]](vertex_client.create_client(found[1]), name)
    elif found and found[2] == "pipelineJobs":
        pipeline_client.watch(pipeline_client.create_clients(found[1]), name)
    else:
        raise UserError(
            f"{name} is not the resource name of a job: write projects/PROJECT/locations/REGION/"
            "KIND/NUMBER as the launcher printed it, with customJobs for a run, "
            "hyperparameterTuningJobs for a search or pipelineJobs for a pipeline as KIND."
        )
