"""Google Cloud for all launchers: its errors as clear messages, and files that grow."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from tftpu import installation
from tftpu.errors import UserError
from tftpu.storage import buckets
from tftpu.storage.buckets import BucketError

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


class Follower:
    """A reader of the lines that are appended to a file in a bucket.

    Args:
        path: "gs://bucket/folder/file", which need not exist yet.
    """

    def __init__(self, path: str):
        self._path = path
        self._seen = 0

    def print_new(self) -> None:
        """Prints the complete lines appended since the last call; nothing if it cannot read."""
        print(self.read_new(), end="", flush=True)

    def read_new(self) -> str:
        """Returns the complete lines appended since the last call; "" if it cannot read."""
        try:
            data = buckets.read_range(self._path, self._seen)
        except BucketError:  # no file yet, or out of reach: the run continues, without its lines
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self._seen += len(whole)
        return whole.decode(errors="replace")


def read_in_folders(folder: str, name: str) -> dict[str, str]:
    """Returns the content of all files of a name below a folder of a bucket.

    Args:
        folder: "gs://bucket/folder".
        name: of the files.

    Returns:
        The contents by the folders below this one that they are in; the folder itself is "". Empty
        while the bucket cannot be read.
    """
    try:
        return {
            path.rpartition("/")[0]: buckets.read(f"{folder}/{path}").decode(errors="replace")
            for path in buckets.list_files(folder)
            if path.rpartition("/")[2] == name
        }
    except BucketError:
        return {}
