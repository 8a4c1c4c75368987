"""Creates a JobSet in a cluster and finds its pods, with Kubernetes' own Python client."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from typing import Any

from tftpu import installation
from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.gke.job import GROUP, PLURAL, VERSION, GkeJob, JobSet, format_kubectl
from tftpu.launch.cloud.google_cloud import ConnectionLost
from tftpu.launch.diagnosis import cloud
from tftpu.launch.diagnosis.machine import Machine

TIMEOUT_S = 60.0
# A connection that is lost for longer ends the wait, not the run.
PATIENCE_S = 600.0
POLL_S = 10.0
_CREDENTIALS = "gcloud container clusters get-credentials CLUSTER --location=LOCATION"
_INSTALL = "https://jobset.sigs.k8s.io/docs/installation"


class RefusedError(UserError):
    """The cluster refused a request."""


class NotFoundError(RefusedError):
    """The cluster does not have what a request names."""


@dataclasses.dataclass(frozen=True)
class ClusterNamespace:
    """A namespace of a cluster.

    Attributes:
        objects: the client's `CustomObjectsApi`, for JobSets.
        core: the client's `CoreV1Api`, for pods and their logs.
        namespace: name of the namespace.
        context: of the kubeconfig; None means the current one.
    """

    objects: Any
    core: Any
    namespace: str
    context: str | None

    def check(self) -> None:
        """Raises `UserError` if the cluster cannot be reached, or does not know JobSets."""
        try:
            self._call("looking for JobSets", "list_namespaced_custom_object", limit=1)
        except NotFoundError as error:
            raise UserError(
                f"The cluster does not know JobSets ({error}) Install JobSet: {_INSTALL}."
            ) from error
        except ConnectionLost as lost:
            raise UserError(
                f"{lost} Is it the right one of `kubectl config get-contexts`, and reachable from "
                "here?"
            ) from lost

    def create(self, created: JobSet) -> None:
        """Creates a JobSet. An answer that is lost is not an error if the JobSet is there.

        Raises:
            UserError: the request was rejected.
            ConnectionLost: no answer came, and whether the JobSet is there cannot be found out.
        """
        try:
            self._call("creating the JobSet", "create_namespaced_custom_object", body=created)
        except NotFoundError as error:
            raise UserError(
                f"The cluster has no namespace {self.namespace} ({error}) Create it with `kubectl "
                f"create namespace {self.namespace}`, or name another one with --namespace."
            ) from error
        except ConnectionLost as lost:
            name = created["metadata"]["name"]
            print(f"No answer to the request for {name}: looking for it.", flush=True)
            if self.find(name) is None:
                raise UserError(
                    f"{lost} There is no JobSet {name}: the request never arrived. If it appears, "
                    f"this ends it: {self.format_command('delete', 'jobset', name)}"
                ) from lost

    def find(self, name: str) -> JobSet | None:
        """Returns a JobSet with its status; None if it is not there."""
        what = "watching the JobSet"
        try:
            return self.call_with_retries(
                lambda: self._call(what, "get_namespaced_custom_object", name=name)
            )
        except NotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Deletes a JobSet and, with it, its pods."""
        what = "deleting the JobSet"
        self.call_with_retries(
            lambda: self._call(what, "delete_namespaced_custom_object", name=name)
        )

    def list_pods(self, name: str) -> list[Any]:
        """Returns the pods of a JobSet, as the client's `V1Pod`."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        found = self.call_with_retries(
            lambda: call(
                "watching the pods",
                self.core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                _request_timeout=TIMEOUT_S,
            )
        )
        return found.items

    def read_log(self, pod: str, **limits: Any) -> str:
        """Returns the output of a pod, "" if it cannot be read.

        Args:
            pod: its name.
            **limits: `timestamps`, `since_seconds` or `tail_lines`, as for the client.
        """
        try:
            answer = call(
                "reading the log",
                self.core.read_namespaced_pod_log,
                pod,
                self.namespace,
                _preload_content=False,
                _request_timeout=TIMEOUT_S,
                **limits,
            )
        except (UserError, ConnectionLost):  # it has not started, or is gone
            return ""
        return answer.data.decode(errors="replace")

    def format_command(self, verb: str, *words: str) -> str:
        """Returns the command of `kubectl` for this namespace."""
        return format_kubectl(verb, [*words], self.namespace, self.context)

    def call_with_retries(self, function: Callable[[], Any]) -> Any:
        """Repeats a request while no answer comes; raises ConnectionLost after `PATIENCE_S`."""
        since = time.monotonic()
        told = False
        while True:
            try:
                return function()
            except ConnectionLost as lost:
                if time.monotonic() - since > PATIENCE_S:
                    raise
                if not told:
                    print(f"{lost} Trying again for {PATIENCE_S / 60:.0f} minutes.", flush=True)
                    told = True
                time.sleep(POLL_S)

    def _call(self, what: str, method: str, **request: Any) -> Any:
        place = {"group": GROUP, "version": VERSION, "plural": PLURAL}
        return call(
            what,
            getattr(self.objects, method),
            namespace=self.namespace,
            **place,
            **request,
            _request_timeout=TIMEOUT_S,
        )


def require() -> None:
    """Raises `UserError`, with the command to run, if the client is not installed."""
    try:
        __import__("kubernetes")
    except ImportError as error:
        raise UserError(
            f"The client of Kubernetes is not installed: run `{installation.command('gke')}`, or "
            "add --dry_run to `tftpu launch gke`, which needs none."
        ) from error


def connect(namespace: str, context: str | None) -> ClusterNamespace:
    """Returns a namespace of the cluster that the kubeconfig names, once it has answered.

    Args:
        namespace: its name.
        context: of the kubeconfig; None means the current one.

    Raises:
        UserError: there is no kubeconfig, it has no such context, or the cluster cannot be used.
    """
    from kubernetes import client, config

    settings: Any = client.Configuration()  # whose types differ between its versions
    settings.retries = False  # `call_with_retries` repeats what may be repeated, without a word
    try:
        api = config.new_client_from_config(
            config_file=os.environ.get("KUBECONFIG") or None,
            context=context,
            client_configuration=settings,
        )
    except config.ConfigException as error:
        raise UserError(
            f"No cluster can be reached ({_extract_first_line(str(error))}): run "
            f"`{_CREDENTIALS}`, and "
            "name one of `kubectl config get-contexts` with --context, if it is not the current."
        ) from error
    cluster = ClusterNamespace(
        client.CustomObjectsApi(api), client.CoreV1Api(api), namespace, context
    )
    cluster.check()
    return cluster


def submit(cluster: ClusterNamespace, order: GkeJob, created: JobSet) -> None:
    """Uploads what travels, and creates the JobSet.

    Raises:
        UserError: the bucket cannot be written, the request was rejected, or it is not known
            whether the JobSet is there.
    """
    bucket = order.workdir.removeprefix("gs://").partition("/")[0]
    for problem in cloud.find_problems(Machine(), [bucket]):
        raise UserError(f"{problem.what} {problem.why} Fix it with `{problem.command}`.")
    order.shipment.upload(order.workdir)
    name = created["metadata"]["name"]
    try:
        cluster.create(created)
    except (ConnectionLost, KeyboardInterrupt) as error:
        why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
        raise UserError(
            f"{why} The JobSet {name} may run, and incur costs; this ends it: "
            f"{cluster.format_command('delete', 'jobset', name)}"
        ) from error


def call(what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the client, and turns its errors into clear messages.

    Args:
        what: the attempt, for messages, such as "creating the JobSet".
        function: method of the client.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Raises:
        RefusedError: the request was rejected.
        NotFoundError: what it names is not there.
        ConnectionLost: no answer came, so it is not known whether the call succeeded.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return function(*args, **kwargs)
    except ApiException as error:
        raise _translate_error(what, error) from error
    except HTTPError as error:
        said = _extract_first_line(str(error))
        raise ConnectionLost(f"No answer from the cluster ({what}): {said}") from error


def _translate_error(what: str, error: Any) -> Exception:
    """Returns the error to raise for an answer with an error of the cluster."""
    said = _extract_message(error)
    if error.status == 401:
        return RefusedError(
            f"The cluster did not accept the credentials ({what}): run `{google_cloud.LOGIN}` and "
            f"`{_CREDENTIALS}`."
        )
    if error.status == 403:
        return RefusedError(
            f"Permission denied ({what}): {said} Ask the owner of the cluster for a role that may "
            "create JobSets and read pods and their logs, such as roles/container.developer."
        )
    if error.status == 404:
        return NotFoundError(said)
    if error.status == 429 or error.status >= 500:
        return ConnectionLost(f"No answer from the cluster ({what}): {said}")
    return RefusedError(f"The cluster refused the request ({what}): {said}")


def _extract_message(error: Any) -> str:
    """Returns what the cluster said of an error, as one sentence."""
    body = error.body or error.reason or f"status {error.status}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        body = json.loads(body)["message"]
    return f"{_extract_first_line(str(body)).rstrip('.')}."


def _extract_first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[0][:300]
