"""Follows a run that `tftpu launch gke` started, after its terminal was closed.

tftpu launch gke-attach python-gpt-1122-14d641
"""

import dataclasses

from tftpu.launch.cloud.gke import job
from tftpu.launch.settings.options import argument, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The JobSet to follow."""

    jobset: str = argument("JOBSET", "name of the JobSet, as `tftpu launch gke` printed it")
    context: str | None = flag(
        None, "cluster, by its name in the kubeconfig", metavar="CONTEXT", shown="the current one"
    )
    namespace: str = flag("default", "namespace of the cluster", metavar="NAME")


def run(options: Options) -> None:
    """Prints what the first pod prints and the state of all, until the run ends.

    Raises:
        UserError: there is no such JobSet, or the run failed.
    """
    from tftpu.launch.cloud.gke import client, follow

    job.check_name("namespace", options.namespace)
    client.require()
    cluster = client.connect(options.namespace, options.context)
    follow.watch(cluster, options.jobset)
