"""The request of `tftpu launch gke`: a JobSet that trains a config on a slice of TPUs.

The JobSet is a dictionary with the field names of its API
(https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2). A dry run prints it as YAML, which
`kubectl apply --filename=FILE` accepts.
"""

import dataclasses
from typing import Any

from tftpu.errors import ExitCode, UserError
from tftpu.launch.cloud import job
from tftpu.launch.cloud.launchers import RUNTIMES, suggest_launcher
from tftpu.tpu.slices import Slice

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
CONTAINER = "train"
# Node label of each generation: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
_TPU = "google.com/tpu"
_SPOT = "cloud.google.com/gke-spot"
_DISK = {"ephemeral-storage": "10Gi"}  # space for packages; Autopilot's default is 1 GiB
_GRACE_S = 300  # seconds that a pod has to save a checkpoint after SIGTERM
_KEPT_S = 86400  # seconds until an ended JobSet is deleted, and its pods' logs with it

JobSet = dict[str, Any]  # a JobSet as JSON, with the field names of the Kubernetes API


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeJob(job.CloudJob):
    """A JobSet to create, on a slice that `check_slice` allows, with one pod on each host.

    The service account is a Kubernetes account. The timeout limits an attempt, including its wait
    for machines.

    Attributes:
        namespace: the namespace of the cluster.
        image: container image with bash and Python.
        restarts: the largest number of restarts of all pods, after preemptions or failures.
    """

    namespace: str
    image: str
    restarts: int = 10

    def build_jobset(self, name: str) -> JobSet:
        """Returns the JobSet to create.

        Raises:
            UserError: a label is not allowed, or tftpu itself sets it.
        """
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "labels": self.build_labels(),
        }
        if self.slice.hosts > 1:  # keeps the pods of a Job on the machines of one slice
            key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                # This headless Service gives the pods DNS names, by which they find one another.
                "network": {
                    "enableDNSHostnames": True,
                    "subdomain": name,
                    "publishNotReadyAddresses": True,
                },
                "failurePolicy": {
                    "maxRestarts": self.restarts,
                    "rules": [
                        {
                            "name": "notRestarted",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                        }
                    ],
                },
                "ttlSecondsAfterFinished": _KEPT_S,
                "replicatedJobs": [
                    {
                        "name": "slice",
                        "replicas": self.slice.slices,
                        "template": {"spec": self._build_job()},
                    }
                ],
            },
        }

    def _build_job(self) -> dict[str, Any]:
        """Returns the Job of a slice, with one pod on each host. If one pod fails, all end."""
        codes = [int(ExitCode.USER_ERROR)]  # a restart does not fix a user's mistake
        mistake = {"containerName": CONTAINER, "operator": "In", "values": codes}
        hosts = self.slice.single.hosts
        return {
            "completionMode": "Indexed",
            "completions": hosts,
            "parallelism": hosts,
            "backoffLimit": 0,
            "activeDeadlineSeconds": self.timeout,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
            "template": {"spec": self._build_pod()},
        }

    def _build_pod(self) -> dict[str, Any]:
        """Returns the specification of each host's pod."""
        arguments = self.build_arguments(self.workdir)
        tpus = {_TPU: str(self.slice.chips_per_host)}
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_S,
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": _ACCELERATORS[self.slice.generation.name],
                "cloud.google.com/gke-tpu-topology": self.slice.shape,
            },
            "containers": [
                {
                    "name": CONTAINER,
                    "image": self.image,
                    "command": job.build_container_command(self.shipment, self.workdir, arguments),
                    "resources": {"limits": tpus, "requests": {**tpus, **_DISK}},
                }
            ],
        }
        if self.spot:
            pod["nodeSelector"][_SPOT] = "true"
            pod["tolerations"] = [
                {"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
            ]
        if self.service_account:
            pod["serviceAccountName"] = self.service_account
        return pod

    def as_yaml(self, created: JobSet) -> str:
        """Formats a JobSet as YAML, with the command that submits it in a comment."""
        return self.format_request("kubectl apply --filename=FILE", created)


def check_slice(wanted: Slice) -> None:
    """Raises `UserError` for a slice that GKE does not have, or slices that it cannot join."""
    if wanted.generation.name not in _ACCELERATORS:
        raise UserError(
            f"GKE has no slice {wanted.name}, only slices of {', '.join(_ACCELERATORS)}. "
            f"{suggest_launcher(wanted)}"
        )
    if wanted.slices > 1 and wanted.single.hosts == 1:
        other = suggest_launcher(wanted) if wanted.generation.name in RUNTIMES else ""
        raise UserError(
            f"GKE joins only slices with several hosts, but {wanted.single.name} has one host: "
            f"choose larger slices. {other}".rstrip()
        )


def check_account(name: str) -> None:
    """Raises `UserError` for an e-mail address, which only other launchers take as an account."""
    if "@" in name:
        raise UserError(
            f"--service_account={name} is an account of Google Cloud. Give the name of the "
            "Kubernetes service account in the namespace that Workload Identity links to it."
        )
