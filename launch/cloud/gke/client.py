"""Creates a JobSet in a cluster and finds its pods, with Kubernetes' own Python client."""

import contextlib
import dataclasses
import json
import os
import shlex
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, waiting
from tftpu.launch.cloud.gke.job import GROUP, PLURAL, VERSION, GkeJob, JobSet
from tftpu.launch.cloud.google_cloud import ConnectionLost, NotFoundError
from tftpu.launch.diagnosis.cloud import LOGIN

TIMEOUT_S = 60.0
_CREDENTIALS = "gcloud container clusters get-credentials CLUSTER --location=LOCATION"
_INSTALL = "https://jobset.sigs.k8s.io/docs/installation"


def _read_error(error: Exception) -> tuple[int, str] | None:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    if isinstance(error, HTTPError):
        return google_cloud.NO_ANSWER, str(error)
    if not isinstance(error, ApiException):
        return None
    status = error.status or 400
    said = error.body or error.reason or f"status {status}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(said)["message"]
    return google_cloud.NO_ANSWER if status == 429 or status >= 500 else status, str(said)


call = google_cloud.ApiService(
    "the cluster",
    {
        401: "The cluster did not accept the credentials ({what}): run "
        f"`{LOGIN}` and `{_CREDENTIALS}`.",
        403: "Permission denied ({what}): {said} Ask the owner of the cluster for a role that may "
        "create JobSets and read pods and their logs, such as roles/container.developer.",
        404: "{said}",
    },
    _read_error,
).call


@dataclasses.dataclass(frozen=True)
class ClusterNamespace:
    """A namespace of a cluster.

    Attributes:
        objects: the client's `CustomObjectsApi`, for JobSets.
        core: the client's `CoreV1Api`, for pods and their logs.
        namespace: name of the namespace.
        context: the context of the kubeconfig; None means the current one.
    """

    objects: Any
    core: Any
    namespace: str
    context: str | None

    def check(self) -> None:
        """Raises `UserError` if the cluster cannot be reached or used, or has no JobSet API."""
        try:
            self._call("looking for JobSets", "list_namespaced_custom_object", limit=1)
        except NotFoundError as error:
            raise UserError(
                f"The cluster does not know JobSets ({error}) Install JobSet: {_INSTALL}."
            ) from error
        except ConnectionLost as lost:
            raise UserError(
                f"{lost} Is the right context chosen (see `kubectl config get-contexts`), and can "
                "this machine reach the cluster?"
            ) from lost

    def create(self, created: JobSet) -> None:
        """Creates a JobSet. If the answer is lost, looks for the JobSet.

        Raises:
            UserError: the request was rejected, or no answer came and there is no such JobSet.
            ConnectionLost: no answer came, and it is unknown whether the JobSet exists.
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
            if waiting.retry(lambda: self.find(name)) is None:
                raise UserError(
                    f"{lost} There is no JobSet {name}, so the request never arrived. If it "
                    f"appears later, end it with {self.format_deletion(name)}"
                ) from lost

    def find(self, name: str) -> JobSet | None:
        """Returns a JobSet with its status; None if it does not exist."""
        try:
            return self._call("watching the JobSet", "get_namespaced_custom_object", name=name)
        except NotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Deletes a JobSet and, with it, its pods."""
        method = "delete_namespaced_custom_object"
        waiting.retry(lambda: self._call("deleting the JobSet", method, name=name))

    def list_pods(self, name: str) -> list[Any]:
        """Returns the pods of a JobSet, as the client's `V1Pod`."""
        return call(
            "watching the pods",
            self.core.list_namespaced_pod,
            self.namespace,
            label_selector=select_pods(name),
            _request_timeout=TIMEOUT_S,
        ).items

    def read_log(self, pod: str, **limits: Any) -> str:
        """Returns the output of a pod, "" if it cannot be read.

        Args:
            pod: name of the pod.
            **limits: the client's arguments `timestamps`, `since_seconds` or `tail_lines`.
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
        except (UserError, ConnectionLost):  # the pod has not started, or was deleted
            return ""
        return answer.data.decode(errors="replace")

    def format_command(self, *arguments: str) -> str:
        """Returns a `kubectl` command for this namespace, quoted for a shell."""
        cluster = [f"--context={self.context}"] if self.context else []
        return shlex.join(["kubectl", *arguments, f"--namespace={self.namespace}", *cluster])

    def format_deletion(self, name: str) -> str:
        """Returns the command that ends a JobSet."""
        return self.format_command("delete", "jobset", name)

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


def select_pods(jobset: str) -> str:
    """Returns the label selector that matches the pods of a JobSet."""
    return f"jobset.sigs.k8s.io/jobset-name={jobset}"


def connect(namespace: str, context: str | None) -> ClusterNamespace:
    """Returns a namespace of the cluster in the kubeconfig, after checking that it can be used.

    Args:
        namespace: name of the namespace.
        context: the context of the kubeconfig; None means the current one.

    Raises:
        UserError: the client is not installed, there is no kubeconfig, it has no such context, or
            the cluster cannot be used.
    """
    google_cloud.require("kubernetes", "client of Kubernetes is", "gke")
    from kubernetes import client, config

    # The type of `Configuration` differs between the client's versions.
    settings: Any = client.Configuration()
    settings.retries = False  # `waiting.retry` repeats only requests that are safe to repeat
    try:
        api = config.new_client_from_config(
            config_file=os.environ.get("KUBECONFIG") or None,
            context=context,
            client_configuration=settings,
        )
    except config.ConfigException as error:
        raise UserError(
            f"No cluster can be reached ({google_cloud.to_sentence(str(error)).rstrip('.')}): run "
            f"`{_CREDENTIALS}`. If its context is not the current one, name it with --context; "
            "`kubectl config get-contexts` lists all."
        ) from error
    cluster = ClusterNamespace(
        client.CustomObjectsApi(api), client.CoreV1Api(api), namespace, context
    )
    cluster.check()
    return cluster


def submit(cluster: ClusterNamespace, order: GkeJob, created: JobSet) -> None:
    """Uploads the run's files and creates the JobSet.

    Raises:
        UserError: the bucket cannot be written, the request was rejected, or it is unknown whether
            the JobSet exists.
    """
    order.ship()
    name = created["metadata"]["name"]
    ending = f"this ends it: {cluster.format_deletion(name)}"
    with waiting.creating(f"The JobSet {name} may run, and incur costs; {ending}"):
        cluster.create(created)
