"""Follows a hyper-parameter tuning job of Vertex AI to its end, and prints its best trials."""

import re
from typing import TYPE_CHECKING

from tftpu.errors import UserError
from tftpu.launch.cloud.vertex import client as vertex_client
from tftpu.launch.cloud.vertex import trials
from tftpu.launch.cloud.vertex.client import TUNING

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import HyperparameterTuningJob, JobServiceClient


def follow(client: "JobServiceClient", name: str) -> None:
    """Prints each trial of a job when it ends, and the best trials after the last one.

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
    """Returns the address of a job's page in the console, which the SDK prints as well."""
    project, region, number = name.split("/")[1::2]
    console = "https://console.cloud.google.com/agent-platform"
    return f"{console}/locations/{region}/training/{number}?project={project}"


def explain_how_to_follow(name: str) -> str:
    """Returns a line with the command that shows the best trials of a job."""
    return f"Its best trials:     {_format_attach_command(name)}"


def _format_attach_command(name: str) -> str:
    return f"tftpu launch vertex-search-attach {name}"


def parse_region(name: str) -> str:
    """Returns the region of a job.

    Raises:
        UserError: the name does not belong to such a job.
    """
    form = r"projects/[^/]+/locations/([^/]+)/hyperparameterTuningJobs/[^/]+"
    found = re.fullmatch(form, name)
    if not found:
        raise UserError(
            f"{name} is not the resource name of a search: write "
            "projects/PROJECT/locations/REGION/hyperparameterTuningJobs/NUMBER, which `tftpu "
            "launch vertex-search` has printed."
        )
    return found[1]
