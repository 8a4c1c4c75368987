"""Recognizes Colab, Kaggle, TPU VMs and GKE, and asks the metadata server about the slice."""

import urllib.error
import urllib.request

from tftpu.errors import counted
from tftpu.launch.diagnosis.machine import Machine

_TIMEOUT_S = 0.5  # seconds; a metadata server is on the machine itself and answers at once


def describe(machine: Machine) -> dict[str, str]:
    """Returns the facts for the top of the report: the platform, such as Colab, and the slice."""
    environ = machine.environ
    accelerator = read_attribute(machine, "accelerator-type")
    if "COLAB_RELEASE_TAG" in environ:
        place = "Colab"
    elif "KAGGLE_KERNEL_RUN_TYPE" in environ:
        place = "Kaggle"
    elif "KUBERNETES_SERVICE_HOST" in environ:
        place = "GKE" if "TPU_WORKER_HOSTNAMES" in environ else "Kubernetes"
    elif accelerator:
        place = "TPU VM"
    else:
        place = "none of Colab, Kaggle, TPU VM, GKE"
    facts = {"Place": place}
    accelerator = accelerator or environ.get("TPU_ACCELERATOR_TYPE")
    if accelerator:
        workers = read_attribute(machine, "worker-network-endpoints") or environ.get(
            "TPU_WORKER_HOSTNAMES", ""
        )
        facts["Slice"] = f"{accelerator}, {counted(len(workers.split(',')), 'worker')}"
    return facts


def read_attribute(machine: Machine, name: str) -> str | None:
    """Returns an attribute of the machine from Google Cloud's metadata server; None if unknown."""
    return _read_metadata(machine, f"attributes/{name}")


def has_account(machine: Machine) -> bool:
    """Returns whether the metadata server gives the machine credentials of a service account."""
    return _read_metadata(machine, "service-accounts/default/email") is not None


def _read_metadata(machine: Machine, path: str) -> str | None:
    if machine.environ.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    # Google's client libraries use the same variable. The default is an address instead of a name,
    # because a name server might not answer.
    host = machine.environ.get("GCE_METADATA_HOST", "169.254.169.254")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}",
        headers={"Metadata-Flavor": "Google"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return response.read().decode().strip() or None
    except (urllib.error.URLError, OSError):
        return None
