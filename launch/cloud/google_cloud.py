"""What both launchers need of Google Cloud: its errors in a sentence, the lines of a run."""

import os
from collections.abc import Callable
from typing import Any

from tftpu.errors import UserError

LOGIN = "gcloud auth application-default login"


def require(module: str) -> None:
    """Raises `UserError`, with the command to run, unless the client libraries are there."""
    try:
        __import__(module)
    except ImportError as error:
        raise UserError(
            "The clients of Google Cloud are not installed: run `pip install 'tftpu[gcp]'`, or add "
            "--dry_run, which needs none."
        ) from error


def project(given: str | None) -> str:
    """The project: `--project`, else GOOGLE_CLOUD_PROJECT.

    Raises:
        UserError: neither is set.
    """
    found = given or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not found:
        raise UserError("Which project of Google Cloud pays? Write --project=PROJECT.")
    return found


def call(what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a client; what Google Cloud refuses becomes a sentence.

    Args:
        what: the thing that was attempted, as "creating the job".

    Raises:
        UserError: refused for good.
        ConnectionLost: no answer came, so nobody knows whether it was done.
    """
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions

    try:
        return function(*args, **kwargs)
    except (auth_exceptions.GoogleAuthError, exceptions.Unauthenticated) as error:
        raise UserError(
            f"Google Cloud does not know who you are ({what}): run `{LOGIN}`."
        ) from error
    except _lost() as error:
        raise ConnectionLost(f"No answer from Google Cloud ({what}): {_said(error)}") from error
    except exceptions.PermissionDenied as error:
        raise UserError(
            f"You may not do this ({what}): {_said(error)} Ask the owner of the project for the "
            "role that the message names, or for roles/aiplatform.user or roles/tpu.admin."
        ) from error
    except exceptions.ResourceExhausted as error:
        raise UserError(
            f"There is no quota for this ({what}): {_said(error)} Ask for more at "
            "https://console.cloud.google.com/iam-admin/quotas, or try another region, zone or "
            "slice, or --spot, which has a quota of its own."
        ) from error
    except exceptions.GoogleAPICallError as error:
        raise UserError(f"Google Cloud refuses ({what}): {_said(error)}") from error


class ConnectionLost(Exception):  # noqa: N818 (what was asked may have been done)
    """A request was sent and no answer came."""


def _lost() -> tuple[type[Exception], ...]:
    from google.api_core import exceptions

    return (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.RetryError,
        exceptions.Unknown,
        exceptions.InternalServerError,
        exceptions.Aborted,
        exceptions.Cancelled,
    )


def _said(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error)
    return f"{text.strip().splitlines()[0][:300].rstrip('.')}." if text.strip() else ""


class Follower:
    """Reads what is added to a file of a bucket.

    Args:
        path: "gs://bucket/folder/file", which need not be there yet.
    """

    def __init__(self, path: str):
        bucket, _, self._name = path.removeprefix("gs://").partition("/")
        self._bucket_name = bucket
        self._bucket = None
        self._seen = 0

    def print_new(self) -> None:
        """Prints the whole lines that were added since the last call; nothing if it cannot look."""
        print(self.read_new(), end="", flush=True)

    def read_new(self) -> str:
        """The whole lines that were added since the last call; none if it cannot look."""
        from google.api_core import exceptions
        from google.auth import exceptions as auth_exceptions
        from google.cloud import storage

        try:
            if self._bucket is None:
                self._bucket = storage.Client(project="unused").bucket(self._bucket_name)
            data = self._bucket.blob(self._name).download_as_bytes(start=self._seen, timeout=30)
        # The file is not there yet, or holds nothing new; or the bucket cannot be read. The run
        # goes on without its lines here.
        except (exceptions.GoogleAPICallError, auth_exceptions.GoogleAuthError, OSError):
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self._seen += len(whole)
        return whole.decode(errors="replace")
