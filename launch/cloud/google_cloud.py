"""Google Cloud for all launchers: its errors as clear messages, and files that grow."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from tftpu import installation
from tftpu.errors import UserError

LOGIN = "gcloud auth application-default login"
T = TypeVar("T")


def require(module: str) -> None:
    """Raises `UserError`, with the command to run, if a client library is not installed."""
    try:
        __import__(module)
    except ImportError as error:
        raise UserError(
            f"The clients of Google Cloud are not installed: run `{installation.command('gcp')}`, "
            "or add --dry_run, which needs none."
        ) from error


def resolve_project(given: str | None) -> str:
    """Returns the project: `--project`, else GOOGLE_CLOUD_PROJECT.

    Raises:
        UserError: neither is set.
    """
    found = given or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not found:
        raise UserError("No project of Google Cloud is given: write --project=PROJECT.")
    return found


def call(what: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls a method of a client, and turns its errors into clear messages.

    Args:
        what: the attempt, for messages, such as "creating the job".
        function: method of a client.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Raises:
        UserError: the request was rejected.
        ConnectionLost: no answer came, so it is not known whether the call succeeded.
    """
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions

    try:
        return function(*args, **kwargs)
    except (auth_exceptions.GoogleAuthError, exceptions.Unauthenticated) as error:
        raise UserError(
            f"There are no credentials for Google Cloud ({what}): run `{LOGIN}`."
        ) from error
    except _list_connection_errors() as error:
        raise ConnectionLost(
            f"No answer from Google Cloud ({what}): {_format_error(error)}"
        ) from error
    except exceptions.PermissionDenied as error:
        raise UserError(
            f"Permission denied ({what}): {_format_error(error)} Ask the owner of the project for "
            "the "
            "role that the message names, or for roles/aiplatform.user or roles/tpu.admin."
        ) from error
    except exceptions.ResourceExhausted as error:
        raise UserError(
            f"The quota is exceeded ({what}): {_format_error(error)} Request more at "
            "https://console.cloud.google.com/iam-admin/quotas, or try another region, zone or "
            "slice, or --spot, which has a separate quota."
        ) from error
    except exceptions.GoogleAPICallError as error:
        raise UserError(
            f"Google Cloud refused the request ({what}): {_format_error(error)}"
        ) from error


class ConnectionLost(Exception):  # noqa: N818 (the request may have succeeded)
    """A request was sent, and no answer came."""


def _list_connection_errors() -> tuple[type[Exception], ...]:
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


def _format_error(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error)
    return f"{text.strip().splitlines()[0][:300].rstrip('.')}." if text.strip() else ""


def _list_read_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of reading a file that is missing, or in a bucket that cannot be read."""
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions

    return exceptions.GoogleAPICallError, auth_exceptions.GoogleAuthError, OSError


class Follower:
    """A reader of the lines that are appended to a file in a bucket.

    Args:
        path: "gs://bucket/folder/file", which need not exist yet.
    """

    def __init__(self, path: str):
        bucket, _, self._name = path.removeprefix("gs://").partition("/")
        self._bucket_name = bucket
        self._bucket = None
        self._seen = 0

    def print_new(self) -> None:
        """Prints the complete lines appended since the last call; nothing if it cannot read."""
        print(self.read_new(), end="", flush=True)

    def read_new(self) -> str:
        """Returns the complete lines appended since the last call; "" if it cannot read."""
        from google.cloud import storage

        try:
            if self._bucket is None:
                self._bucket = storage.Client(project="unused").bucket(self._bucket_name)
            data = self._bucket.blob(self._name).download_as_bytes(start=self._seen, timeout=30)
        # The file does not exist yet, or has nothing new; or the bucket cannot be read. The run
        # continues, without its lines here.
        except _list_read_errors():
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self._seen += len(whole)
        return whole.decode(errors="replace")


class BucketFolder:
    """A reader of small files below a folder of a bucket.

    Args:
        path: "gs://bucket/folder".
    """

    def __init__(self, path: str):
        from google.cloud import storage

        self._bucket, _, prefix = path.removeprefix("gs://").partition("/")
        self._prefix = f"{prefix}/"
        self._client = call("finding credentials", storage.Client, project="unused")

    def read(self, name: str) -> dict[str, str]:
        """Returns the content of all files of a name, by the folders below this one they are in.

        The folder itself is "". Nothing is returned while the bucket cannot be read.
        """
        try:
            found = self._client.list_blobs(self._bucket, prefix=self._prefix, timeout=30)
            blobs = {blob.name.removeprefix(self._prefix): blob for blob in found}
            return {
                path.rpartition("/")[0]: blob.download_as_bytes(timeout=30).decode(errors="replace")
                for path, blob in blobs.items()
                if path.rpartition("/")[2] == name
            }
        except _list_read_errors():
            return {}
