"""Google Cloud for all launchers: requests, errors as clear messages, and buckets."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tftpu import installation
from tftpu.errors import UserError
from tftpu.launch.diagnosis.cloud import LOGIN
from tftpu.storage import buckets
from tftpu.storage.buckets import BucketError

NO_ANSWER = 0  # stands for the HTTP status of a request that got no answer
T = TypeVar("T")


class RefusedError(UserError):
    """A service refused a request."""


class NotFoundError(RefusedError):
    """The object that a request names does not exist."""


class QuotaError(RefusedError):
    """A quota is exceeded, such as that of requests in a minute."""


class ConnectionLost(Exception):  # noqa: N818 (the request may have succeeded)
    """A request was sent, but no answer came."""


@dataclasses.dataclass(frozen=True)
class ApiService:
    """A service that answers requests, with a message for each of its errors.

    Attributes:
        name: the service's name in messages, such as "the cluster".
        messages: templates by HTTP status; `{what}` is the attempt, and `{said}` the answer.
        read_error: a function that returns the status of a client's error (`NO_ANSWER` if none
            came) and the service's message; None if the error is not from the client.
    """

    name: str
    messages: Mapping[int, str]
    read_error: Callable[[Exception], tuple[int, str] | None]

    def call(self, what: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Calls a method of a client and turns its errors into clear messages.

        Args:
            what: the attempt, for messages, such as "creating the job".
            function: method of a client.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Raises:
            RefusedError: the request was rejected.
            NotFoundError: the named object does not exist.
            ConnectionLost: no answer came, so it is not known whether the call succeeded.
        """
        try:
            return function(*args, **kwargs)
        except Exception as error:
            found = self.read_error(error)
            if found is None:
                raise
            status, said = found[0], to_sentence(found[1])
            if status == NO_ANSWER:
                raise ConnectionLost(f"No answer from {self.name} ({what}): {said}") from error
            name = f"{self.name[0].upper()}{self.name[1:]}"
            text = self.messages.get(status, name + " refused the request ({what}): {said}")
            kind = {404: NotFoundError, 429: QuotaError}.get(status, RefusedError)
            raise kind(text.format(what=what, said=said)) from error


def _read_error(error: Exception) -> tuple[int, str] | None:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    lost = (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.RetryError,
        exceptions.Unknown,
        exceptions.InternalServerError,
        exceptions.Aborted,
        exceptions.Cancelled,
    )
    if isinstance(error, GoogleAuthError):
        return 401, ""
    if isinstance(error, lost):
        return NO_ANSWER, error.message
    if isinstance(error, exceptions.GoogleAPICallError):
        return error.code or 400, error.message
    return None


_SERVICE = ApiService(
    "Google Cloud",
    {
        401: f"There are no credentials for Google Cloud ({{what}}): run `{LOGIN}`.",
        403: "Permission denied ({what}): {said} Ask the owner of the project for the role that "
        "the message names, or for roles/aiplatform.user or roles/tpu.admin.",
        429: "The quota is exceeded ({what}): {said} Request more at "
        "https://console.cloud.google.com/iam-admin/quotas, or try another region, zone or slice, "
        "or --spot, which has a separate quota.",
    },
    _read_error,
)
call = _SERVICE.call


def to_sentence(text: str) -> str:
    """Returns the first line of a service's message, shortened, with a full stop."""
    return f"{(text.strip().splitlines() or ['no reason was given'])[0][:300].rstrip('.')}."


def require(module: str, clients: str = "clients of Google Cloud are", extra: str = "gcp") -> None:
    """Raises `UserError`, with the command to run, if a client library is not installed.

    Args:
        module: the module of the library.
        clients: the message's subject and verb, such as "client of Kubernetes is".
        extra: the extra of tftpu that installs it.
    """
    try:
        __import__(module)
    except ImportError as error:
        raise UserError(
            f"The {clients} not installed: run `{installation.command(extra)}`, or add --dry_run "
            "to the launch command, which then needs no client."
        ) from error


def connect(client: Callable[..., T], region: str | None = None) -> T:
    """Returns a client of Google Cloud.

    Args:
        client: class of the client.
        region: region of a client of Vertex AI; None for other clients.
    """
    options = {"client_options": {"api_endpoint": f"{region}-aiplatform.googleapis.com"}}
    return call("finding credentials", client, **(options if region else {}))


def to_message(kind: Callable[..., T], spec: dict[str, Any]) -> T:
    """Converts a dictionary with the REST interface's field names to a protobuf message."""
    from google.protobuf import json_format

    described: Any = kind
    return kind(json_format.ParseDict(spec, described.pb(described())))


class BucketFolder:
    """A folder of a bucket to which machines write. What cannot be read counts as not yet written.

    Args:
        path: "gs://bucket/folder", which need not exist yet.
    """

    def __init__(self, path: str):
        self._path = path
        self._seen = collections.Counter[str]()  # the number of bytes read so far of each file

    def print_new(self, name: str) -> None:
        """Prints the complete lines that were appended to a file since the last call."""
        print(self.read_new(name), end="", flush=True)

    def read_new(self, name: str) -> str:
        """Returns the complete lines that were appended to a file since the last call."""
        try:
            data = buckets.read_range(f"{self._path}/{name}", self._seen[name])
        except BucketError:  # for example, the machine has not written the file yet
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self._seen[name] += len(whole)
        return whole.decode(errors="replace")

    def read(self, name: str) -> dict[str, str]:
        """Returns the text of each file with the given name, by the path of its subfolder.

        A file directly in this folder has the path "". Returns {} if one cannot be read.
        """
        try:
            return {
                path.rpartition("/")[0]: self._read_text(path)
                for path in buckets.list_files(self._path)
                if path.rpartition("/")[2] == name
            }
        except BucketError:
            return {}

    def _read_text(self, path: str) -> str:
        return buckets.read(f"{self._path}/{path}").decode(errors="replace")
