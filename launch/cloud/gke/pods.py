"""The pods of a JobSet: their states, why they wait or how they ended, and their output."""

import dataclasses
import time
from typing import Any

from tftpu.errors import ExitCode
from tftpu.launch.cloud.gke.client import ClusterNamespace
from tftpu.launch.cloud.gke.job import CONTAINER

_INDEX = "batch.kubernetes.io/job-completion-index"
_SLICE = "jobset.sigs.k8s.io/job-index"
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
_CLOCKS_S = 60  # seconds by which the node's clock and this machine's may differ
# Ranks of exit codes that are consequences of another pod's failure or of a signal. Any other code
# has rank 0, because it may be the cause of a failure. The code of lowest rank is reported.
_CONSEQUENCES = {137: 1, 143: 2, ExitCode.PREEMPTED: 3, ExitCode.HOST_LOST: 4}
_OUT_OF_MEMORY = "OOMKilled"


@dataclasses.dataclass(frozen=True)
class Pod:
    """The state of a pod.

    Attributes:
        name: name of the pod.
        index: the number of its slice, and the number of its host in that slice.
        started: whether it runs, or has run.
        waits_for: why it has not started; "" if it has, or if the reason is unknown.
        code: its exit code; None before its end.
        ended_by: Kubernetes's reason for the end, such as "OOMKilled"; "" before its end.
        attempt: the number of restarts before it was created; None if that is unknown.
    """

    name: str
    index: tuple[int, int]
    started: bool
    waits_for: str
    code: int | None
    ended_by: str = ""
    attempt: int | None = None

    @property
    def chief(self) -> bool:
        """True for the pod of the first host of the first slice."""
        return self.index == (0, 0)

    @property
    def runs(self) -> bool:
        """True if the pod has started and has not ended."""
        return self.started and self.code is None


def read_pods(cluster: ClusterNamespace, jobset: str) -> list[Pod]:
    """Returns the pods of a JobSet, sorted by slice and host."""
    found = [_convert_pod(pod) for pod in cluster.list_pods(jobset)]
    return sorted(found, key=lambda pod: (pod.index, pod.name))


def find_cause(pods: list[Pod]) -> Pod | None:
    """Returns the pod whose failure ended the others; None if no pod is known to have failed."""
    failed = [pod for pod in pods if pod.code]

    def rank(pod: Pod) -> tuple[int, tuple[int, int]]:
        of_code = _CONSEQUENCES.get(pod.code or 0, 0)
        return (0 if pod.ended_by == _OUT_OF_MEMORY else of_code, pod.index)

    return min(failed, key=rank, default=None)


def _convert_pod(found: Any) -> Pod:
    """Converts the client's `V1Pod`."""
    known = {**(found.metadata.annotations or {}), **(found.metadata.labels or {})}
    attempt = int(known[_ATTEMPT]) if _ATTEMPT in known else None
    return dataclasses.replace(_convert_state(found, known), attempt=attempt)


def _convert_state(found: Any, known: dict[str, str]) -> Pod:
    metadata, status = found.metadata, found.status
    index = int(known.get(_SLICE, 0)), int(known.get(_INDEX, 0))
    containers = [c for c in status.container_statuses or () if c.name == CONTAINER]
    state = containers[0].state if containers else None
    if state and state.terminated:
        ended = state.terminated
        return Pod(metadata.name, index, True, "", ended.exit_code, ended.reason or "")
    if state and state.waiting:
        return Pod(metadata.name, index, False, _format_reason(state.waiting), None)
    unscheduled = [
        c for c in status.conditions or () if c.type == "PodScheduled" and c.status == "False"
    ]
    waits_for = _format_reason(unscheduled[0]) if unscheduled else ""
    return Pod(metadata.name, index, status.phase != "Pending", waits_for, None)


def _format_reason(state: Any) -> str:
    """Returns the reason and the message of a container's or a pod's state as one line."""
    return ": ".join(filter(None, (state.reason, state.message))).replace("\n", " ")[:300]


class PodLog:
    """The output of a pod, which is read line by line.

    Args:
        cluster: the namespace of the pod.
        pod: name of the pod.
    """

    def __init__(self, cluster: ClusterNamespace, pod: str):
        self.pod = pod
        self._cluster = cluster
        self._newest = ""
        self._window: dict[str, int] = {}  # limits of the next read; the first one has none
        self._read_at = time.monotonic()

    def print_new(self) -> None:
        """Prints the lines since the last call. Prints nothing if they cannot be read."""
        began = time.monotonic()
        text = self._cluster.read_log(self.pod, timestamps=True, **self._window)
        for line in text.splitlines():
            stamp, _, printed = line.partition(" ")
            if _to_sortable(stamp) > self._newest:
                self._newest = _to_sortable(stamp)
                print(printed, flush=True)
        if text:
            self._read_at = began
        if self._newest:
            elapsed = time.monotonic() - self._read_at
            self._window = {"since_seconds": int(elapsed) + _CLOCKS_S}


def _to_sortable(stamp: str) -> str:
    """Returns an RFC 3339 time with all nine digits of its fraction, so that texts sort by time."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:<09}"
