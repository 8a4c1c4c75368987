"""A service in place of a Kubernetes cluster with JobSet, which the real client talks to.

A JobSet is created only if the models made from the published schemas of JobSet and of Kubernetes
read every field of it.
"""

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pydantic
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/research/jobsets"
PODS = "/api/v1/namespaces/research/pods"
PREFIX = "POD"  # in names of pods; the cluster writes the JobSet's


@dataclasses.dataclass
class Moment:
    """The state of a JobSet and its pods between two looks at it.

    Attributes:
        pods: as `pod` returns them.
        condition: type of a condition of the JobSet that holds, "" if there is none.
        message: of that condition.
        restarts: how often all pods were started again.
    """

    pods: list[dict[str, Any]]
    condition: str = ""
    message: str = ""
    restarts: int = 0


def pod(
    index: int, state: dict[str, Any] | None = None, attempt: int = 0, job: int = 0
) -> dict[str, Any]:
    """Returns a pod of a host: of its container's state, or not scheduled if that is None."""
    status: dict[str, Any] = {"phase": "Pending"}
    if state is None:
        why = "0/3 nodes are available: 3 Insufficient google.com/tpu."
        gap = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        status["conditions"] = [gap]
    else:
        code = state.get("terminated", {}).get("exitCode")
        if "waiting" not in state:
            status["phase"] = "Running" if code is None else "Failed" if code else "Succeeded"
        about = {"image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        status["containerStatuses"] = [{"name": "train", "state": state, **about}]
    labels = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/job-index": str(job),
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
    }
    name = f"{PREFIX}-slice-{job}-{index}-{attempt:05}"
    return {"metadata": {"name": name, "labels": labels}, "status": status}


RUNS: dict[str, Any] = {"running": {}}


def ended(code: int) -> dict[str, Any]:
    """Returns the state of a container that ended."""
    return {"terminated": {"exitCode": code}}


class Kubernetes:
    """A cluster that takes a JobSet through given moments, and fails where a test asks for it.

    Attributes:
        moments: each look at the JobSet is one; the last one repeats.
        logs: lines with a time, by host and attempt as in "0-00000"; or by
            slice, too, as in "1-0-00000".
        created: bodies of the requests.
        alive: names of the JobSets that are there.
        deleted: names of those that were deleted.
        faults: by method, statuses to answer with, in order; 0 breaks the connection.
        after_creation: those that begin with the creation of the JobSet.
        loses_answer: whether the answer to the creation is lost, which succeeds nevertheless.
    """

    def __init__(self):
        self.moments = [Moment([pod(0, ended(0))], "Completed")]
        self.logs: dict[str, str] = {}
        self.created: list[dict[str, Any]] = []
        self.alive: list[str] = []
        self.deleted: list[str] = []
        self.asked: list[dict[str, list[str]]] = []  # queries for logs
        self.looks = 0
        self.faults: dict[str, list[int]] = {"POST": [], "GET": [], "DELETE": []}
        self.after_creation: dict[str, list[int]] = {}
        self.loses_answer = False

    def create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            read = JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(body)))
        except pydantic.ValidationError as error:
            return 422, {"message": f"JobSet is invalid: {error}"}
        if read is None or read.to_dict() != body:
            return 422, {"message": "JobSet is invalid: unknown field"}
        self.created.append(body)
        self.alive.append(body["metadata"]["name"])
        return 201, body

    def look(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.alive:
            return 404, {"message": f'jobsets.jobset.x-k8s.io "{name}" not found'}
        if len(self.moments) > 1 and self.looks:
            self.moments.pop(0)
        self.looks += 1
        moment = self.moments[0]
        found = {"type": moment.condition, "status": "True", "message": moment.message}
        status = {"conditions": [found] if found["type"] else [], "restarts": moment.restarts}
        [body] = [b for b in self.created if b["metadata"]["name"] == name]
        return 200, {**body, "status": status}

    def list_pods(self, name: str) -> tuple[int, dict[str, Any]]:
        pods = json.loads(json.dumps(self.moments[0].pods).replace(PREFIX, name))
        return 200, {"kind": "PodList", "apiVersion": "v1", "items": pods}

    def delete(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.alive:
            return 404, {"message": "not found"}
        self.alive.remove(name)
        self.deleted.append(name)
        return 200, {"status": "Success"}

    def log(self, name: str, query: dict[str, list[str]]) -> tuple[int, str]:
        self.asked.append(query)
        of_first, of_any = ("-".join(name.split("-")[-parts:]) for parts in (2, 3))
        text = self.logs.get(of_any, self.logs.get(of_first))
        if text is None:
            return 400, json.dumps({"message": "container is waiting to start"})
        if "tailLines" in query:
            text = "".join(text.splitlines(keepends=True)[-int(query["tailLines"][0]) :])
        # Kubernetes takes "True", which version 30 of the client writes, for true as well.
        if [value.lower() for value in query.get("timestamps", [])] != ["true"]:
            text = "".join(line.partition(" ")[2] for line in text.splitlines(keepends=True))
        return 200, text


@contextmanager
def serving(cluster: Kubernetes, folder: Path) -> Iterator[Path]:
    """Serves a cluster on loopback, and yields the path of a kubeconfig for it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._fails("POST"):
                return
            if self.path != JOBSETS:
                self._send(404, {"message": "the server could not find the requested resource"})
                return
            answer = cluster.create(body)
            cluster.faults |= cluster.after_creation
            if not cluster.loses_answer:
                self._send(*answer)

        def do_GET(self):
            if self._fails("GET"):
                return
            url, query = urlparse(self.path), parse_qs(urlparse(self.path).query)
            if url.path.endswith("/log"):
                self._send(*cluster.log(url.path.split("/")[-2], query))
            elif url.path == JOBSETS:
                self._send(200, {"items": []})
            elif url.path == PODS:
                self._send(*cluster.list_pods(query["labelSelector"][0].partition("=")[2]))
            else:
                assert url.path.startswith(f"{JOBSETS}/")
                self._send(*cluster.look(url.path.removeprefix(f"{JOBSETS}/")))

        def do_DELETE(self):
            if not self._fails("DELETE"):
                self._send(*cluster.delete(self.path.removeprefix(f"{JOBSETS}/")))

        def _fails(self, method: str) -> bool:
            if not cluster.faults[method]:
                return False
            status = cluster.faults[method].pop(0)
            if status:
                self._send(status, {"message": f"fault {status}.\nmore"})
            return True

        def _send(self, status: int, body: dict[str, Any] | str) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{server.server_port}")))
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()


def _kubeconfig(address: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
