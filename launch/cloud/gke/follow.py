"""Follows a JobSet: prints the output of its first pod, the states of all pods, and the result."""

import collections
import math
import time
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.gke import client
from tftpu.launch.cloud.gke import pods as gke_pods
from tftpu.launch.cloud.gke.client import ClusterNamespace
from tftpu.launch.cloud.gke.job import JobSet
from tftpu.launch.cloud.gke.pods import Pod, PodLog


def watch(cluster: ClusterNamespace, name: str, queue_s: float = math.inf) -> None:
    """Follows a JobSet to its end; after Ctrl-C the run continues.

    Args:
        cluster: the namespace of the JobSet.
        name: name of the JobSet.
        queue_s: seconds that its pods may wait for machines, at the start and after each restart.
            After that time the JobSet is deleted.

    Raises:
        UserError: the run failed, its pods did not start in time, there is no such JobSet, or the
            cluster rejects a request.
    """
    with waiting.watching(describe_running(cluster, name)):
        _JobSetWatcher(cluster, name, queue_s).follow()


def describe_running(cluster: ClusterNamespace, name: str) -> str:
    """Returns a message about a JobSet that is no longer watched."""
    command = f"tftpu launch gke-attach {name} --namespace={cluster.namespace}"
    command += f" --context={cluster.context}" if cluster.context else ""
    return (
        f"The JobSet {name} keeps running, and incurs costs; `{command}` follows it again, and "
        f"`{cluster.format_deletion(name)}` ends it."
    )


class _JobSetWatcher:
    """A follower of a JobSet. Its arguments are those of `watch`."""

    def __init__(self, cluster: ClusterNamespace, name: str, queue_s: float):
        self._cluster = cluster
        self._name = name
        self._queue_s = queue_s
        self._patience_ends = time.monotonic() + queue_s
        self._restarts = 0
        self._logs: list[PodLog] = []  # the log of the first pod of each attempt
        self._states = waiting.StateLog()

    def follow(self) -> None:
        for jobset, pods in waiting.poll(self._look):
            self._print_log(pods)
            current = _select_current(jobset, pods)
            self._print_state(jobset, current)
            if _find_condition(jobset, "Completed"):
                print(f"The run has ended, and nothing runs any more. {self._describe_kept_logs()}")
                return
            failed = _find_condition(jobset, "Failed")
            if failed:
                raise UserError(self._describe_failure(failed, pods))
            self._end_waiting(jobset, current)

    def _look(self) -> tuple[JobSet, list[Pod]]:
        """Returns the JobSet, and its pods sorted by slice and host."""
        jobset = self._cluster.find(self._name)
        if jobset is None:
            raise UserError(
                f"There is no JobSet {self._name} in the namespace {self._cluster.namespace}: it "
                "was deleted, or never existed. None of its pods runs."
            )
        return jobset, gke_pods.read_pods(self._cluster, self._name)

    def _print_log(self, pods: list[Pod]) -> None:
        """Prints the new lines of the first pod, and of the pod that replaced it at a restart."""
        chiefs = [pod for pod in pods if pod.chief and pod.started]
        for pod in chiefs:
            if pod.name not in [log.pod for log in self._logs]:
                self._logs.append(PodLog(self._cluster, pod.name))
        for log in self._logs:
            if log.pod in [pod.name for pod in chiefs]:
                log.print_new()

    def _print_state(self, jobset: JobSet, pods: list[Pod]) -> None:
        """Prints how many pods run and why one of the others waits, whenever that changes."""
        said = f"{sum(pod.runs for pod in pods)} of {_count_expected_pods(jobset)} pods run"
        restarts, limit = _count_restarts(jobset), jobset["spec"]["failurePolicy"]["maxRestarts"]
        if restarts:
            said += f" (restart {restarts} of {limit})"
        codes = collections.Counter(pod.code for pod in pods if pod.code is not None)
        said += "".join(f"; {count} ended with code {code}" for code, count in codes.items())
        waiting = [pod for pod in pods if pod.waits_for]
        if waiting:
            said += f"; {waiting[0].name} waits: {waiting[0].waits_for}"
        if _find_condition(jobset, "Suspended"):
            said += "; suspended"
        self._states.print(said)

    def _end_waiting(self, jobset: JobSet, pods: list[Pod]) -> None:
        """Deletes the JobSet and raises `UserError` if its pods wait too long."""
        if _count_restarts(jobset) > self._restarts:
            self._restarts = _count_restarts(jobset)
            self._patience_ends = time.monotonic() + self._queue_s
        started = sum(pod.started for pod in pods)
        if started >= _count_expected_pods(jobset):
            self._patience_ends = math.inf
        if time.monotonic() < self._patience_ends:
            return
        waiting = [pod for pod in pods if pod.waits_for]
        why = f" {waiting[0].name} waits: {waiting[0].waits_for}." if waiting else ""
        self._cluster.delete(self._name)
        raise UserError(
            f"Only {started} of {_count_expected_pods(jobset)} pods started in the time that "
            f"--queue_timeout allows.{why} The JobSet {self._name} was deleted. Try another "
            "slice, --spot, or a cluster with a node pool of this slice."
        )

    def _describe_failure(self, failed: dict[str, Any], pods: list[Pod]) -> str:
        """Returns why the run failed; prints the failed pod's last lines unless already printed."""
        said = failed.get("message") or failed.get("reason") or "no reason was given"
        pod = gke_pods.find_cause(pods)
        if pod is None:
            kept = self._describe_kept_logs()
            return f"The run failed: {said.rstrip('.')}. Nothing runs any more. {kept}"
        if not pod.chief:
            log = self._cluster.read_log(pod.name, tail_lines=waiting.LAST_LINES)
            waiting.print_last_lines(pod.name, log)
        return (
            f"The run failed: {pod.name} ended with code {pod.code} ({said.rstrip('.')}). Nothing "
            f"runs any more. {self._describe_kept_logs()}"
        )

    def _describe_kept_logs(self) -> str:
        """Returns a message that says where the output is kept, and for how long."""
        selector = f"--selector={client.select_pods(self._name)}"
        command = self._cluster.format_command("logs", selector, "--tail=-1", "--prefix")
        return f"For a day, this shows the output of the pods: {command}"


def _find_condition(jobset: JobSet, kind: str) -> dict[str, Any] | None:
    """Returns a condition of a JobSet if its status is true; otherwise None."""
    found = jobset.get("status", {}).get("conditions") or ()
    return next((c for c in found if c["type"] == kind and c["status"] == "True"), None)


def _select_current(jobset: JobSet, pods: list[Pod]) -> list[Pod]:
    """Returns the pods without those of earlier attempts, which exist a while after a restart."""
    restarts = _count_restarts(jobset)
    return [pod for pod in pods if pod.attempt is None or pod.attempt >= restarts]


def _count_restarts(jobset: JobSet) -> int:
    return jobset.get("status", {}).get("restarts", 0)


def _count_expected_pods(jobset: JobSet) -> int:
    """Returns the number of pods of a JobSet when all of them exist."""
    jobs = jobset["spec"]["replicatedJobs"]
    return sum(j.get("replicas", 1) * j["template"]["spec"]["parallelism"] for j in jobs)
