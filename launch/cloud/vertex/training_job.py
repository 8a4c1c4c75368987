"""The request of `tftpu launch vertex`: a Vertex AI custom job that trains a config.

The specification is a dictionary with the field names of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec). A dry run prints it as
YAML, which `gcloud ai custom-jobs create --config=FILE` also reads.
"""

import dataclasses
import re
import shlex
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import job
from tftpu.launch.cloud.launchers import suggest_launcher
from tftpu.tpu.slices import Slice

# Accelerator types, and prefixes of machine types. One replica of a worker pool is a whole slice:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute and training-with-tpu-vm
_FIXED = {"v2-8": "TPU_V2", "v3-8": "TPU_V3"}
_FAMILIES = {"v5e": "ct5lp-hightpu", "v6e": "ct6e-standard"}
# Slices on which Vertex AI runs the TensorFlow engine.
_TENSORFLOW = ("v2-8", "v3-8", "v5e-1", "v5e-4")

CustomJob = dict[str, Any]  # JSON with the field names of the REST interface


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexJob(job.CloudJob):
    """A job to create, on a slice that `check_slice` and `check_engine` allow.

    Attributes:
        project: project of Google Cloud that pays.
        region: region of the job.
        image: container image built from `launch/Dockerfile`, or another with Python and bash.
        tensorboard: resource name of a Vertex AI TensorBoard; needs a service account.
        subfolder: folder of the run in the workdir; "" means the workdir itself.
    """

    project: str
    region: str
    image: str
    tensorboard: str | None = None
    subfolder: str = ""

    @property
    def parent(self) -> str:
        """The resource name of the location in which the job is created."""
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def run_folder(self) -> str:
        """The run's workdir; with a TensorBoard, the subfolder `logs` that Vertex AI watches."""
        folder = f"{self.workdir}/{self.subfolder}" if self.subfolder else self.workdir
        return f"{folder}/logs" if self.tensorboard else folder

    def build_custom_job(self) -> CustomJob:
        """Returns the CustomJob to create, under a unique name.

        Raises:
            UserError: Vertex AI would reject a value of the job.
        """
        arguments = self.build_arguments(self.run_folder)
        command = job.build_container_command(self.shipment, self.workdir, arguments)
        return {
            "displayName": job.make_unique_name(self.config),
            "jobSpec": self.build_job_spec({"command": command}, self.workdir),
            "labels": self.build_labels(),
        }

    def build_job_spec(self, container: dict[str, Any], output: str) -> dict[str, Any]:
        """Returns the specification of a job.

        Args:
            container: the fields of the job's container, without the image.
            output: "gs://bucket/folder"; the container's AIP_CHECKPOINT_DIR is a folder in it.

        Raises:
            UserError: Vertex AI would reject a value of the job.
        """
        machine = _build_machine_spec(self.slice)
        if self.tensorboard:
            _check_tensorboard(self.tensorboard, self.service_account)
        scheduling = {
            "timeout": f"{self.timeout}s",
            "restartJobOnWorkerRestart": True,  # the run resumes from its last checkpoint
        }
        if self.spot:
            scheduling["strategy"] = "SPOT"
        spec: dict[str, Any] = {
            "workerPoolSpecs": [
                {
                    "machineSpec": machine,
                    "replicaCount": 1,
                    "containerSpec": {"imageUri": self.image, **container},
                }
            ],
            "scheduling": scheduling,
            "baseOutputDirectory": {"outputUriPrefix": output},
        }
        if self.service_account:
            spec["serviceAccount"] = self.service_account
        if self.tensorboard:
            spec["tensorboard"] = self.tensorboard
        return spec

    def as_yaml(self, created: CustomJob) -> str:
        """Formats a job's specification for `gcloud`, with the command for it in a comment."""
        return self.format_for_gcloud("custom-jobs", created, created["jobSpec"])

    def format_for_gcloud(self, command: str, created: dict[str, Any], file: dict[str, Any]) -> str:
        """Formats the file that creates a job, with the command that reads it in a comment.

        Args:
            command: the command of `gcloud ai`, such as "custom-jobs".
            created: the job, whose name and labels are used.
            file: content of the file.
        """
        labels = ",".join(f"{key}={value}" for key, value in created["labels"].items())
        arguments = [
            *("gcloud", "ai", command, "create", "--config=FILE"),
            f"--project={self.project}",
            f"--region={self.region}",
            f"--display-name={created['displayName']}",
            f"--labels={labels}",
        ]
        return self.format_request(shlex.join(arguments), file)


def check_slice(wanted: Slice) -> None:
    """Raises `UserError` for a slice on which custom jobs of Vertex AI cannot run."""
    if wanted.slices > 1:
        raise UserError(
            f"A custom job of Vertex AI has one slice, but {wanted.name} are {wanted.slices} "
            f"slices: choose a single slice. {suggest_launcher(wanted)}"
        )
    if wanted.name not in _FIXED and wanted.generation.name not in _FAMILIES:
        raise UserError(
            f"{wanted.name} is not a slice for custom jobs of Vertex AI: choose v2-8, v3-8, or a "
            f"slice of v5e or v6e. {suggest_launcher(wanted)}"
        )


def check_engine(wanted: Slice, engine: str) -> None:
    """Raises `UserError` if Vertex AI does not run the engine on the slice."""
    if engine == "tensorflow" and wanted.name not in _TENSORFLOW:
        raise UserError(
            f"Vertex AI runs TensorFlow only on {', '.join(_TENSORFLOW)}: for {wanted.name}, add "
            "--config.cluster.engine=jax."
        )
    if engine == "jax" and wanted.name in _FIXED:
        raise UserError(
            f"On Vertex AI, the JAX engine trains on slices of v5e and v6e, not on {wanted.name}: "
            "choose such a slice, or --config.cluster.engine=tensorflow without a mesh."
        )


def _build_machine_spec(wanted: Slice) -> dict[str, str | int]:
    if wanted.name in _FIXED:
        accelerator = {"acceleratorType": _FIXED[wanted.name], "acceleratorCount": 8}
        return {"machineType": "cloud-tpu", **accelerator}
    family = _FAMILIES[wanted.generation.name]
    return {"machineType": f"{family}-{wanted.chips_per_host}t", "tpuTopology": wanted.shape}


def _check_tensorboard(name: str, service_account: str | None) -> None:
    if not service_account:
        raise UserError(
            "--tensorboard needs --service_account=NAME@PROJECT.iam.gserviceaccount.com: Vertex "
            "AI uploads the events as that account, and rejects the job without one."
        )
    if not re.fullmatch(r"projects/[^/\s]+/locations/[^/\s]+/tensorboards/\d+", name):
        raise UserError(
            f"--tensorboard={name} is not the resource name of a TensorBoard: write "
            "projects/PROJECT/locations/REGION/tensorboards/NUMBER."
        )
