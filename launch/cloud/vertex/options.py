"""The flags that all Vertex AI jobs share, and the job that they describe."""

import dataclasses

from tftpu.config import Experiment
from tftpu.launch.cloud import engine
from tftpu.launch.cloud.options import JobOptions, ProjectOptions
from tftpu.launch.cloud.vertex import training_job
from tftpu.launch.settings.options import flag
from tftpu.tpu.slices import parse_slice
from tftpu.version import __version__

CLIENT = "google.cloud.aiplatform_v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexOptions(ProjectOptions, JobOptions):
    """The config to run, and the job for it."""

    image: str | None = flag(
        None,
        "container image made from launch/Dockerfile",
        metavar="IMAGE",
        shown="tftpu in the project's registry",
    )
    region: str = flag("us-central1", "region of the job", metavar="REGION")
    detach: bool = flag(False, "do not wait for the end of the run")

    def build_job(
        self, experiment: Experiment, tensorboard: str | None = None
    ) -> training_job.VertexJob:
        """Returns the job to create; in a dry run, placeholders stand for missing values.

        Args:
            experiment: the experiment to train.
            tensorboard: resource name of a Vertex AI TensorBoard.

        Raises:
            UserError: a value or the client library is missing, or Vertex AI does not train the
                experiment on the slice.
        """
        wanted = parse_slice(self.slice)
        training_job.check_slice(wanted)
        trained_by = engine.choose_for_slice(experiment, wanted)
        training_job.check_engine(wanted, trained_by)
        project = self.resolve_project(CLIENT, self.dry_run)
        return training_job.VertexJob(
            project=project,
            region=self.region,
            image=self.image or format_image(self.region, project, "tftpu"),
            tensorboard=tensorboard,
            **self.build_fields(wanted, trained_by),
        )


def format_image(region: str, project: str, name: str) -> str:
    """Returns the address of the container image of this tftpu version in a project's registry."""
    return f"{region}-docker.pkg.dev/{project}/tftpu/{name}:{__version__}"
