"""The request of `tftpu launch vertex`: a Vertex AI custom job that trains a config.

The specification is a dictionary with the names of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec). A dry run prints what
would be sent, which `gcloud ai custom-jobs create --config=FILE` takes as well.
"""

import dataclasses
import re
import shlex
from typing import Any

import yaml

from tftpu.errors import UserError
from tftpu.launch.cloud import job
from tftpu.launch.cloud.shipment import Shipment

# The slices on which Vertex runs TensorFlow, each one machine:
# https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm
MACHINES: dict[str, dict[str, str | int]] = {
    "v2-8": {"machineType": "cloud-tpu", "acceleratorType": "TPU_V2", "acceleratorCount": 8},
    "v3-8": {"machineType": "cloud-tpu", "acceleratorType": "TPU_V3", "acceleratorCount": 8},
    "v5e-1": {"machineType": "ct5lp-hightpu-1t", "tpuTopology": "1x1"},
    "v5e-4": {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"},
}


CustomJob = dict[str, Any]  # with the names of the REST interface


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A job to create.

    Attributes:
        config: name of a config, or path of a user's own.
        overrides: changes of the config, "--config.train.steps=500".
        slice_name: one of `MACHINES`.
        project: project of Google Cloud that pays.
        region: region of the job.
        workdir: "gs://bucket/folder" of the run.
        image: container image built from `launch/Dockerfile`, or another with Python and bash.
        shipment: the files that travel to the container.
        service_account: e-mail address that the job runs as; None means the default one.
        tensorboard: resource name of a Vertex AI TensorBoard; needs a service account.
        timeout: "90m", "24h" or "7d".
        labels: "key=value,key=value", in addition to tftpu's own.
        spot: cheaper, may be preempted; the run then resumes from its last checkpoint.
    """

    config: str
    overrides: tuple[str, ...] = ()
    slice_name: str
    project: str
    region: str
    workdir: str
    image: str
    shipment: Shipment
    service_account: str | None = None
    tensorboard: str | None = None
    timeout: str = "7d"
    labels: str = ""
    spot: bool = False

    @property
    def parent(self) -> str:
        """The location that the job is created in, as a resource name."""
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def run_folder(self) -> str:
        """The workdir of the run: Vertex AI's TensorBoard reads `logs` of the job's folder."""
        return f"{self.base_folder}/logs" if self.tensorboard else self.base_folder

    @property
    def base_folder(self) -> str:
        """The folder of the job, which holds that of the run and what travels to it."""
        return self.workdir.rstrip("/")

    def custom_job(self) -> CustomJob:
        """Returns the CustomJob to create, under a name that no other job has.

        Raises:
            UserError: a value that Vertex AI would reject.
        """
        machine = _machine(self.slice_name)
        job.check_bucket_folder("workdir", self.workdir)
        if self.tensorboard:
            _check_tensorboard(self.tensorboard, self.service_account)
        arguments = [*self.overrides, f"--workdir={self.run_folder}", "--tpu=local"]
        command = job.container_command(self.shipment, self.base_folder, arguments)
        container = {"imageUri": self.image, "command": command}
        scheduling = {
            "timeout": f"{job.seconds('timeout', self.timeout)}s",
            "restartJobOnWorkerRestart": True,  # the run resumes from its last checkpoint
        }
        if self.spot:
            scheduling["strategy"] = "SPOT"
        spec: CustomJob = {
            "workerPoolSpecs": [
                {"machineSpec": machine, "replicaCount": 1, "containerSpec": container}
            ],
            "scheduling": scheduling,
            "baseOutputDirectory": {"outputUriPrefix": self.base_folder},
        }
        if self.service_account:
            spec["serviceAccount"] = self.service_account
        if self.tensorboard:
            spec["tensorboard"] = self.tensorboard
        return {
            "displayName": job.unique_name(self.config),
            "jobSpec": spec,
            "labels": job.labels(self.config, self.slice_name, self.labels),
        }

    def as_yaml(self, created: CustomJob) -> str:
        """Formats the specification of a job for `gcloud`, below the command that takes it."""
        labels = ",".join(f"{key}={value}" for key, value in created["labels"].items())
        command = [
            *("gcloud", "ai", "custom-jobs", "create", "--config=FILE"),
            f"--project={self.project}",
            f"--region={self.region}",
            f"--display-name={created['displayName']}",
            f"--labels={labels}",
        ]
        shipped = self.shipment.description(self.base_folder)
        head = job.commented(f"{shlex.join(command)}\n\n{shipped}")
        return head + yaml.dump(created["jobSpec"], Dumper=job.Dumper, sort_keys=False)


def _machine(slice_name: str) -> dict[str, str | int]:
    if slice_name in MACHINES:
        return dict(MACHINES[slice_name])
    there_are = f"There, TensorFlow runs on {', '.join(MACHINES)}."
    generation = slice_name.partition("-")[0].replace("v5litepod", "v5e")
    if generation in ("v2", "v3", "v5e"):
        why = "is more than one machine on Vertex AI, and one TensorFlow process drives one"
    elif generation in ("v4", "v5p", "v6e"):
        why = "has no TensorFlow on Vertex AI"
    else:
        raise UserError(f"{slice_name!r} is not the name of a slice of Vertex AI. {there_are}")
    raise UserError(
        f"{slice_name} {why}. {there_are} `tftpu launch tpu-vm --slice={slice_name}` rents it as "
        "a TPU VM."
    )


def _check_tensorboard(name: str, service_account: str | None) -> None:
    if not service_account:
        raise UserError(
            "--tensorboard needs --service_account=NAME@PROJECT.iam.gserviceaccount.com: Vertex AI "
            "uploads the events as that account, and refuses the job without one."
        )
    if not re.fullmatch(r"projects/[^/\s]+/locations/[^/\s]+/tensorboards/\d+", name):
        raise UserError(
            f"--tensorboard={name} is not the resource name of a TensorBoard: write "
            "projects/PROJECT/locations/REGION/tensorboards/NUMBER."
        )
