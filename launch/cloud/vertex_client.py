"""Sends a custom job to Vertex AI and waits for it, with the SDK's own client.

The user is told the job's name, and the command that ends it, before anything can go wrong.
"""

import time

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.google_cloud import ConnectionLost

POLL_S = 15.0
# A connection that is gone for longer ends the wait, not the job.
PATIENCE_S = 600.0


def job_client(region: str):
    """The SDK's client for a region."""
    from google.cloud import aiplatform_v1

    endpoint = f"{region}-aiplatform.googleapis.com"
    return google_cloud.call(
        "finding credentials",
        aiplatform_v1.JobServiceClient,
        client_options={"api_endpoint": endpoint},
    )


def submit(client, project: str, region: str, created: dict) -> str:
    """Creates the job and gives its resource name.

    Args:
        client: a JobServiceClient.
        project: that pays.
        region: where the job runs.
        created: the job, as `vertex.custom_job` makes it.

    Raises:
        UserError: refused; or no answer, and the job cannot be found either.
    """
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    message = json_format.ParseDict(
        created, aiplatform_v1.CustomJob.pb(aiplatform_v1.CustomJob()), ignore_unknown_fields=False
    )
    parent = f"projects/{project}/locations/{region}"
    try:
        job = google_cloud.call(
            "creating the job",
            client.create_custom_job,
            parent=parent,
            custom_job=aiplatform_v1.CustomJob(message),
        )
    except ConnectionLost as lost:
        return _find(client, parent, created["displayName"], lost)
    except KeyboardInterrupt as interrupt:
        name = created["displayName"]
        raise UserError(
            f"Interrupted while the job {name} was asked for: it may run, and cost. "
            f"{_by_hand(parent, name)}"
        ) from interrupt
    return job.name


def _find(client, parent: str, display_name: str, lost: ConnectionLost) -> str:
    """The job that was asked for without an answer; it may run and cost."""
    only = f'display_name="{display_name}"'
    by_hand = _by_hand(parent, display_name)
    try:
        found = list(
            google_cloud.call(
                "looking for the job",
                client.list_custom_jobs,
                request={"parent": parent, "filter": only},
            )
        )
    except (ConnectionLost, UserError) as error:
        raise UserError(f"{lost} The job {display_name} may run, and cost. {by_hand}") from error
    if not found:
        raise UserError(f"{lost} There is no job {display_name} yet. {by_hand}") from lost
    return found[0].name


def _by_hand(parent: str, display_name: str) -> str:
    project, region = parent.split("/")[1::2]
    return (
        f"Look for it with `gcloud ai custom-jobs list --project={project} --region={region} "
        f"--filter=displayName={display_name}` and end it with `gcloud ai custom-jobs cancel NAME "
        f"--region={region}`."
    )


def watch(client, name: str, metrics: google_cloud.Follower) -> None:
    """Waits for the end of a job; prints its states, and its metrics as they come.

    Args:
        client: a JobServiceClient.
        name: resource name of the job.
        metrics: follows the run's metrics.jsonl.

    Raises:
        UserError: the job failed, was cancelled, or cannot be reached any more.
    """
    state, lost_since = None, None
    while True:
        try:
            job = google_cloud.call("watching the job", client.get_custom_job, name=name)
            lost_since = None
        except ConnectionLost as lost:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > PATIENCE_S:
                raise UserError(f"{lost} The job goes on. {how_to_end(name)}") from lost
            time.sleep(POLL_S)
            continue
        if job.state.name != state:
            state = job.state.name
            print(f"{time.strftime('%H:%M:%S')}  {state.removeprefix('JOB_STATE_').lower()}")
        metrics.print_new()
        if state == "JOB_STATE_SUCCEEDED":
            return
        if state in ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED"):
            why = job.error.message or "no reason was given"
            raise UserError(
                f"The job {state.removeprefix('JOB_STATE_').lower()}: {why}. "
                f"`gcloud ai custom-jobs stream-logs {name}` shows what it printed."
            )
        time.sleep(POLL_S)


def how_to_end(name: str) -> str:
    """The sentence that names a job and the command which ends it."""
    return f"The job is {name}; `gcloud ai custom-jobs cancel {name}` ends it."
