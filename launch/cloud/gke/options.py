"""The flags that name a namespace of a cluster."""

import dataclasses

from tftpu.launch.cloud.gke.job import check_name
from tftpu.launch.settings.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A namespace of a cluster."""

    context: str | None = flag(
        None, "cluster, by its name in the kubeconfig", metavar="CONTEXT", shown="the current one"
    )
    namespace: str = flag("default", "namespace of the cluster", metavar="NAME")

    def check(self) -> None:
        """Raises `UserError` unless the namespace is a name that Kubernetes allows."""
        check_name("namespace", self.namespace)
