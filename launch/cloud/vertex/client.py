"""Creates a job of Vertex AI and waits for its end, with the SDK's own client.

On any failure, the job's name and the command that ends it are printed.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.google_cloud import ConnectionLost
from tftpu.launch.cloud.vertex.training_job import VertexJob

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import JobServiceClient

POLL_S = 15.0
# A connection that is lost for longer ends the wait, not the job.
PATIENCE_S = 600.0


class JobKind(NamedTuple):
    """A kind of job, by the names that others have for it.

    Attributes:
        message: type of the SDK.
        field: of the SDK's requests and methods.
        command: of `gcloud ai`.
    """

    message: str
    field: str
    command: str


CUSTOM = JobKind("CustomJob", "custom_job", "custom-jobs")
TUNING = JobKind("HyperparameterTuningJob", "hyperparameter_tuning_job", "hp-tuning-jobs")


def create_client(region: str) -> "JobServiceClient":
    """Returns the SDK's client for a region."""
    from google.cloud import aiplatform_v1

    endpoint = f"{region}-aiplatform.googleapis.com"
    return google_cloud.call(
        "finding credentials",
        aiplatform_v1.JobServiceClient,
        client_options={"api_endpoint": endpoint},
    )


def submit(
    client: "JobServiceClient", kind: JobKind, order: VertexJob, created: dict[str, Any]
) -> str:
    """Uploads what travels to the job, creates the job and returns its resource name.

    Args:
        client: the SDK's client.
        kind: of the job.
        order: who pays, and where the job runs.
        created: the job, with the names of the REST interface.

    Raises:
        UserError: the request was rejected, or no answer came and the job cannot be found.
    """
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    message = getattr(aiplatform_v1, kind.message)
    wanted = message(json_format.ParseDict(created, message.pb(message())))
    order.shipment.upload(order.base_folder)
    try:
        job = google_cloud.call(
            "creating the job",
            getattr(client, f"create_{kind.field}"),
            parent=order.parent,
            **{kind.field: wanted},
        )
    except ConnectionLost as lost:
        return _find(client, kind, order, created["displayName"], lost)
    except KeyboardInterrupt as interrupt:
        name = created["displayName"]
        raise UserError(
            f"Interrupted while the job {name} was created: it may run, and incur costs. "
            f"{_explain_how_to_find(kind, order, name)}"
        ) from interrupt
    return job.name


def _find(
    client: "JobServiceClient",
    kind: JobKind,
    order: VertexJob,
    display_name: str,
    lost: ConnectionLost,
) -> str:
    """Returns the name of a job whose creation request was not answered; it may be running."""
    only = f'display_name="{display_name}"'
    advice = _explain_how_to_find(kind, order, display_name)
    try:
        found = list(
            google_cloud.call(
                "looking for the job",
                getattr(client, f"list_{kind.field}s"),
                request={"parent": order.parent, "filter": only},
            )
        )
    except (ConnectionLost, UserError) as error:
        raise UserError(
            f"{lost} The job {display_name} may run, and incur costs. {advice}"
        ) from error
    if not found:
        raise UserError(f"{lost} There is no job {display_name} yet. {advice}") from lost
    return found[0].name


def _explain_how_to_find(kind: JobKind, order: VertexJob, display_name: str) -> str:
    return (
        f"Look for it with `gcloud ai {kind.command} list --project={order.project} "
        f"--region={order.region} --filter=displayName={display_name}` and end it with "
        f"`gcloud ai {kind.command} cancel NAME --region={order.region}`."
    )


def watch(
    client: "JobServiceClient", kind: JobKind, name: str, show: Callable[[Any], None]
) -> None:
    """Waits for the end of a job; prints its states.

    Args:
        client: the SDK's client.
        kind: of the job.
        name: its resource name.
        show: prints what is new in the job, the SDK's message; it is called at every look.

    Raises:
        UserError: the job failed, was cancelled, or cannot be reached.
    """
    state, lost_since = None, None
    while True:
        try:
            job = google_cloud.call(
                "watching the job", getattr(client, f"get_{kind.field}"), name=name
            )
            lost_since = None
        except ConnectionLost as lost:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > PATIENCE_S:
                raise UserError(
                    f"{lost} The job keeps running. {explain_how_to_end(kind, name)}"
                ) from lost
            time.sleep(POLL_S)
            continue
        if job.state.name != state:
            state = job.state.name
            print(f"{time.strftime('%H:%M:%S')}  {state.removeprefix('JOB_STATE_').lower()}")
        show(job)
        if state == "JOB_STATE_SUCCEEDED":
            return
        if state in ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED"):
            why = job.error.message or "no reason was given"
            raise UserError(
                f"The job {state.removeprefix('JOB_STATE_').lower()}: {why}. "
                f"`gcloud ai {kind.command} stream-logs {name}` shows what it printed."
            )
        time.sleep(POLL_S)


def explain_how_to_end(kind: JobKind, name: str) -> str:
    """Returns a line with the name of a job and the command that ends it."""
    return f"The job is {name}; `gcloud ai {kind.command} cancel {name}` ends it."
