"""The flags that the jobs of Vertex AI share, and the order that they describe."""

import dataclasses

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, job
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.cloud.vertex import training_job
from tftpu.launch.settings.options import ConfigOptions, flag
from tftpu.tpu.slices import Slice
from tftpu.version import __version__


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexOptions(ConfigOptions):
    """The config to run, and the job for it."""

    slice: str = flag("v3-8", "TPU slice, such as v5e-4", metavar="SLICE")
    workdir: str | None = flag(None, "gs://BUCKET/FOLDER of the run (needed)", metavar="DIR")
    image: str | None = flag(
        None,
        "container image made from launch/Dockerfile",
        metavar="IMAGE",
        shown="tftpu in the project's registry",
    )
    package: str | None = flag(
        None,
        "wheel, here or in a bucket, or requirement to install there",
        metavar="PACKAGE",
        shown="the tftpu that is running",
    )
    project: str | None = flag(
        None, "project of Google Cloud that pays", metavar="PROJECT", shown="GOOGLE_CLOUD_PROJECT"
    )
    region: str = flag("us-central1", "region of the job", metavar="REGION")
    service_account: str | None = flag(
        None, "e-mail address that the job runs as", metavar="EMAIL", shown="the default one"
    )
    timeout: str = flag("7d", "when the job is ended: 90m, 24h, 7d", metavar="TIME")
    labels: str = flag("", "labels in addition to tftpu's own", metavar="KEY=VALUE,...")
    spot: bool = flag(False, "use cheaper machines, which may be preempted")
    send_data: bool = flag(False, "send data in the folder of the config without asking")
    detach: bool = flag(False, "do not wait for the end of the job")
    dry_run: bool = flag(False, "print the job, and send nothing")

    def build_job(
        self, command: str, wanted: Slice, trained_by: str, tensorboard: str | None = None
    ) -> training_job.VertexJob:
        """Returns the order; a dry run has placeholders for what was not given.

        Args:
            command: that was given, for messages.
            wanted: the slice.
            trained_by: name of the engine.
            tensorboard: resource name of a Vertex AI TensorBoard.

        Raises:
            UserError: a value is missing.
        """
        project, workdir = self.project, self.workdir
        if self.dry_run:
            project = project or "PROJECT"
            workdir = workdir or f"gs://BUCKET/{job.to_resource_name(self.config)}"
        else:
            google_cloud.require("google.cloud.aiplatform_v1")
            project = google_cloud.resolve_project(project)
        if not workdir:
            raise UserError(
                f"tftpu {command} needs --workdir=gs://BUCKET/FOLDER: files on the machine are "
                "deleted with it."
            )
        registry = f"{self.region}-docker.pkg.dev/{project}/tftpu"
        return training_job.VertexJob(
            config=self.config,
            overrides=self.overrides,
            slice=wanted,
            project=project,
            region=self.region,
            workdir=workdir,
            image=self.image or f"{registry}/tftpu:{__version__}",
            shipment=shipment.pack(self.config, self.package, trained_by),
            service_account=self.service_account,
            tensorboard=tensorboard,
            timeout=self.timeout,
            labels=self.labels,
            spot=self.spot,
        )
