"""The flags that name a namespace of a cluster."""

import dataclasses
import re

from tftpu.errors import UserError
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
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.namespace):
            raise UserError(
                f"--namespace={self.namespace} is not a valid name in Kubernetes. A name has at "
                "most 63 lower-case letters, digits and dashes, and begins and ends with a "
                "letter or a digit."
            )
