"""Creates a job of Vertex AI and waits for its end, with the SDK's own client.

After any failure, the job's name and the command that ends it are printed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, waiting
from tftpu.launch.cloud.google_cloud import ConnectionLost
from tftpu.launch.cloud.vertex.training_job import VertexJob

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import JobServiceClient


class JobKind(NamedTuple):
    """A kind of job, with the names that the SDK and `gcloud` have for it.

    Attributes:
        message: name of the job's class in the SDK.
        field: name of the job in the SDK's requests and methods, such as "custom_job".
        command: the command of `gcloud ai`.
    """

    message: str
    field: str
    command: str


CUSTOM = JobKind("CustomJob", "custom_job", "custom-jobs")
TUNING = JobKind("HyperparameterTuningJob", "hyperparameter_tuning_job", "hp-tuning-jobs")


def create_client(region: str) -> "JobServiceClient":
    """Returns the SDK's client for a region."""
    from google.cloud import aiplatform_v1

    return google_cloud.connect(aiplatform_v1.JobServiceClient, region)


def submit(
    client: "JobServiceClient", kind: JobKind, order: VertexJob, created: dict[str, Any]
) -> str:
    """Uploads the job's files, creates the job and returns its resource name.

    Args:
        client: the SDK's client.
        kind: the kind of the job.
        order: the training job, with the project that pays and the region.
        created: the job, with the field names of the REST interface.

    Raises:
        UserError: the request was rejected, or no answer came and the job cannot be found.
    """
    from google.cloud import aiplatform_v1

    name = created["displayName"]
    advice = (
        f"Look for it with `gcloud ai {kind.command} list --project={order.project} "
        f"--region={order.region} --filter=displayName={name}` and end it with "
        f"`gcloud ai {kind.command} cancel NAME --region={order.region}`."
    )
    wanted = google_cloud.to_message(getattr(aiplatform_v1, kind.message), created)
    order.shipment.upload(order.workdir)
    create = getattr(client, f"create_{kind.field}")
    with waiting.creating(f"The job {name} may run, and incur costs. {advice}"):
        try:
            fields = {"parent": order.parent, kind.field: wanted}
            return google_cloud.call("creating the job", create, **fields).name
        except ConnectionLost as lost:
            found = _find(client, kind, order, name)
            if found is None:
                raise
            if not found:
                raise UserError(f"{lost} There is no job {name} yet. {advice}") from lost
            return found[0]


def _find(
    client: "JobServiceClient", kind: JobKind, order: VertexJob, display_name: str
) -> list[str] | None:
    """Returns the resource names of the jobs with a display name; None if listing failed."""
    request = {"parent": order.parent, "filter": f'display_name="{display_name}"'}
    list_jobs = getattr(client, f"list_{kind.field}s")
    try:
        jobs = google_cloud.call("looking for the job", list_jobs, request=request)
        return [job.name for job in jobs]
    except (ConnectionLost, UserError):
        return None


def watch(
    client: "JobServiceClient",
    kind: JobKind,
    name: str,
    show: Callable[[Any], None],
    again: str = "",
) -> None:
    """Waits for the end of a job and prints its states; after Ctrl-C the job continues.

    Args:
        client: the SDK's client.
        kind: the kind of the job.
        name: resource name of the job.
        show: a function that gets the job (the SDK's message) at every poll, and prints changes.
        again: how to watch the job again, as a message for users who end the watching.

    Raises:
        UserError: the job failed, was cancelled, or cannot be reached.
    """
    get, states = getattr(client, f"get_{kind.field}"), waiting.StateLog()
    with waiting.watching(f"The job keeps running. {explain_how_to_end(kind, name)}{again}"):
        for job in waiting.poll(lambda: google_cloud.call("watching the job", get, name=name)):
            state = job.state.name.removeprefix("JOB_STATE_").lower()
            states.print(state)
            show(job)
            if state == "succeeded":
                return
            if state in ("failed", "cancelled", "expired"):
                raise UserError(
                    f"The job {state}: {job.error.message or 'no reason was given'}. `gcloud ai "
                    f"{kind.command} stream-logs {name}` shows its output."
                )


def explain_how_to_end(kind: JobKind, name: str) -> str:
    """Returns a line with the name of a job and the command that ends it."""
    return f"The job is {name}; `gcloud ai {kind.command} cancel {name}` ends it."
