"""The requests of `tftpu launch vertex-endpoint`: a model of Vertex AI, and its deployment.

Specifications are dictionaries with the field names of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.models and
.../projects.locations.endpoints).
"""

import dataclasses
import re
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import job

PORT = 8080
_MACHINE = r"[a-z][a-z0-9]*-[a-z0-9]+(-[a-z0-9]+)*"
_REGION = r"[a-z]+-[a-z]+[0-9]+"
_ACCELERATOR = r"NVIDIA_[A-Z0-9_]+"

Spec = dict[str, Any]  # JSON with the field names of the REST interface


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexEndpoint:
    """A model to serve.

    Attributes:
        name: display name of the model.
        model: "gs://bucket/folder" of an export; None if a run is served.
        workdir: "gs://bucket/folder" of a run; None if an export is served.
        project: project of Google Cloud that pays.
        region: region of the endpoint.
        image: container image with `tftpu serve`.
        machine: type of the machines, such as "n1-standard-4".
        accelerator: type of their GPU, such as "NVIDIA_TESLA_T4"; None means no GPU.
        replicas: the smallest number of machines.
        most_replicas: the largest number of machines.
        service_account: e-mail address that the server runs as; None means Vertex AI's own.
        endpoint: resource name of the endpoint that serves the model; None creates one.
    """

    name: str
    model: str | None
    workdir: str | None
    project: str
    region: str
    image: str
    machine: str
    accelerator: str | None
    replicas: int
    most_replicas: int
    service_account: str | None
    endpoint: str | None

    @property
    def parent(self) -> str:
        """The resource name of the location of the model and the endpoint."""
        return f"projects/{self.project}/locations/{self.region}"

    def check(self) -> None:
        """Raises `UserError` for a value that Vertex AI would reject."""
        if not re.fullmatch(_MACHINE, self.machine):
            raise UserError(
                f"--machine={self.machine} is not a machine type of Google Cloud, such as "
                "n1-standard-4 or g2-standard-8."
            )
        if not re.fullmatch(_REGION, self.region):
            raise UserError(
                f"--region={self.region} is not a region of Google Cloud, such as us-central1."
            )
        if self.accelerator and not re.fullmatch(_ACCELERATOR, self.accelerator):
            raise UserError(
                f"--accelerator={self.accelerator} is not an accelerator type of Vertex AI, such "
                "as NVIDIA_TESLA_T4 or NVIDIA_L4."
            )
        if self.service_account and "@" not in self.service_account:
            raise UserError(
                f"--service_account={self.service_account} is not an e-mail address, such as "
                f"NAME@{self.project}.iam.gserviceaccount.com."
            )
        if self.most_replicas < self.replicas:
            raise UserError(
                f"--most_replicas={self.most_replicas} is less than --replicas={self.replicas}."
            )
        pattern = r"projects/[^/\s]+/locations/([^/\s]+)/endpoints/[^/\s]+"
        found = re.fullmatch(pattern, self.endpoint) if self.endpoint else None
        if self.endpoint and (not found or found[1] != self.region):
            raise UserError(
                f"--endpoint={self.endpoint} is not the name of an endpoint in {self.region}: "
                f"write projects/PROJECT/locations/{self.region}/endpoints/NUMBER."
            )

    def build_model_spec(self) -> Spec:
        """Returns the model to upload."""
        source = [f"--workdir={self.workdir}"] if self.workdir else []
        container = {
            "imageUri": self.image,
            "command": ["tftpu", "serve", *source],
            "ports": [{"containerPort": PORT}],
            "healthRoute": "/health",
            "predictRoute": "/predict",
        }
        found: Spec = {
            "displayName": self.name,
            "containerSpec": container,
            "labels": dict(job.VERSION_LABEL),
        }
        # Vertex AI copies the model, and the container reads the copy at AIP_STORAGE_URI
        if self.model:
            found["artifactUri"] = self.model
        return found

    def build_endpoint_spec(self) -> Spec:
        """Returns the endpoint to create."""
        return {"displayName": self.name, "labels": dict(job.VERSION_LABEL)}

    def build_deployment_spec(self, model: str) -> Spec:
        """Returns the deployment of a model, given its resource name."""
        machine: Spec = {"machineType": self.machine}
        if self.accelerator:
            machine |= {"acceleratorType": self.accelerator, "acceleratorCount": 1}
        found: Spec = {
            "model": model,
            "displayName": self.name,
            "dedicatedResources": {
                "machineSpec": machine,
                "minReplicaCount": self.replicas,
                "maxReplicaCount": self.most_replicas,
            },
        }
        if self.service_account:
            found["serviceAccount"] = self.service_account
        return found

    def as_yaml(self) -> str:
        """Formats the requests as YAML, in the order in which they are sent."""
        requests: Spec = {"uploadModel": {"parent": self.parent, "model": self.build_model_spec()}}
        if not self.endpoint:
            requests["createEndpoint"] = {
                "parent": self.parent,
                "endpoint": self.build_endpoint_spec(),
            }
        requests["deployModel"] = {
            "endpoint": self.endpoint or f"{self.parent}/endpoints/CREATED",
            "deployedModel": self.build_deployment_spec(f"{self.parent}/models/UPLOADED"),
            "trafficSplit": {"0": 100},
        }
        return job.format_yaml("", requests)
