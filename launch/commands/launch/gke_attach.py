"""Follows a run that `tftpu launch gke` started, after its terminal was closed.

tftpu launch gke-attach python-gpt-1122-14d641
"""

import dataclasses

from tftpu.launch.cloud.gke.options import ClusterOptions
from tftpu.launch.settings.options import required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ClusterOptions):
    """The JobSet to follow."""

    jobset: str = required(
        "JOBSET", "name of the JobSet, as `tftpu launch gke` printed it", word=True
    )


def run(options: Options) -> None:
    """Prints the output of the first pod and the states of all pods, until the run ends.

    Raises:
        UserError: there is no such JobSet, or the run failed.
    """
    from tftpu.launch.cloud.gke import client, follow

    options.check()
    follow.watch(client.connect(options.namespace, options.context), options.jobset)
