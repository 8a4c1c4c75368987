"""Follows a search that `tftpu launch vertex-search` started, and shows its best trials.

tftpu launch vertex-search-attach projects/1/locations/us-central1/hyperparameterTuningJobs/2
"""

import dataclasses

from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.vertex.options import CLIENT
from tftpu.launch.settings.options import required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The job to follow."""

    job: str = required("JOB", "resource name of the job, as `vertex-search` printed it", word=True)


def run(options: Options) -> None:
    """Prints each trial of a job when it ends, and the best trials after the last one.

    Raises:
        UserError: there is no such job, or it failed.
    """
    google_cloud.require(CLIENT)
    from tftpu.launch.cloud.vertex import client as vertex_client
    from tftpu.launch.cloud.vertex import follow

    client = vertex_client.create_client(follow.parse_region(options.job))
    follow.follow(client, options.job)
