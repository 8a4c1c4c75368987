"""Google Cloud: application default credentials, and access to the bucket of a run."""

import json
from pathlib import Path

from tftpu.launch.diagnosis import place
from tftpu.launch.diagnosis.machine import Machine, Problem

LOGIN = "gcloud auth application-default login"
_NEEDED = ["storage.objects.create", "storage.objects.get", "storage.objects.list"]


def describe(machine: Machine) -> dict[str, str]:
    """Returns the facts for the top of the report: the kind and place of the credentials."""
    path = _locate_credentials(machine)
    if path.exists():
        return {"Credentials": f"{_read(path).get('type', 'unknown')} in {path}"}
    if place.has_account(machine):
        return {"Credentials": "the machine's own service account"}
    return {"Credentials": "none"}


def find_problems(machine: Machine, buckets: list[str]) -> list[Problem]:
    """Finds the problems that keep this machine from using Google Cloud.

    Args:
        machine: the machine to examine.
        buckets: names of the buckets that the run needs.
    """
    path = _locate_credentials(machine)
    named = machine.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named and not path.exists():
        return [
            Problem(
                "credentials-file",
                f"GOOGLE_APPLICATION_CREDENTIALS is {named}, which does not exist.",
                "Every use of Google Cloud fails with DefaultCredentialsError.",
                f"unset GOOGLE_APPLICATION_CREDENTIALS && {LOGIN}",
            )
        ]
    found = []
    credentials = _read(path) if path.exists() else {}
    if credentials.get("type") == "authorized_user" and not credentials.get("quota_project_id"):
        found.append(
            Problem(
                "no-quota-project",
                f"The credentials in {path} name no quota project.",
                "Vertex AI and Cloud TPU refuse the requests of a user without one.",
                "gcloud auth application-default set-quota-project PROJECT",
            )
        )
    for bucket in buckets:
        problem = _find_bucket_problem(machine, bucket, bool(credentials))
        found += [problem] if problem else []
    return found


def _locate_credentials(machine: Machine) -> Path:
    named = machine.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return Path(named)
    folder = machine.environ.get("CLOUDSDK_CONFIG") or (
        f"{machine.environ.get('HOME', '/root')}/.config/gcloud"
    )
    return Path(folder) / "application_default_credentials.json"


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _find_bucket_problem(machine: Machine, bucket: str, has_file: bool) -> Problem | None:
    emulator = machine.environ.get("STORAGE_EMULATOR_HOST")
    if not (has_file or emulator or place.has_account(machine)):
        return Problem(
            "no-credentials",
            f"The run needs gs://{bucket}, and this machine has no credentials for Google Cloud.",
            "Reading or writing a bucket fails with 401 or DefaultCredentialsError.",
            LOGIN,
        )
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions
    from google.cloud import storage

    try:
        if emulator:
            client = storage.Client.create_anonymous_client()
        else:
            client = storage.Client(project="unused")
        granted = client.bucket(bucket).test_iam_permissions(_NEEDED, timeout=10)
    except exceptions.NotFound:
        return Problem(
            "no-bucket",
            f"There is no bucket gs://{bucket}.",
            "The run fails at its first file.",
            f"gcloud storage buckets create gs://{bucket}",
        )
    except (exceptions.GoogleAPICallError, auth_exceptions.GoogleAuthError, OSError) as error:
        return Problem(
            "bucket-unreachable",
            f"gs://{bucket} cannot be reached: {type(error).__name__}.",
            "The run fails at its first file.",
            LOGIN,
        )
    missing = sorted(set(_NEEDED) - set(granted))
    if not missing:
        return None
    return Problem(
        "bucket-permissions",
        f"The credentials lack permissions for gs://{bucket}: {', '.join(missing)}.",
        "The run fails at its first file, or at its first checkpoint.",
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --member=MEMBER "
        "--role=roles/storage.objectUser",
    )
