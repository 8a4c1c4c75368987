"""Follows a run, a search or a pipeline on Vertex AI, after its terminal was closed.

A run shows its metrics, a pipeline its steps, a search its trials and, in the end, the best ones.

    tftpu launch vertex-attach projects/1/locations/us-central1/customJobs/2
"""

import dataclasses

from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.vertex.options import CLIENT
from tftpu.launch.settings.options import required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The job to follow."""

    job: str = required("JOB", "resource name of the job, as the launcher printed it", word=True)


def run(options: Options) -> None:
    """Prints the states and results of a job until it ends.

    Raises:
        UserError: there is no such job, or it failed.
    """
    google_cloud.require(CLIENT)
    from tftpu.launch.cloud.vertex import follow

    follow.attach(options.job)
