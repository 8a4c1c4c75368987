"""Suggests a launcher for a slice that another launcher does not have."""

from tftpu.tpu.slices import Slice

# The runtime image of TPU VMs of each generation: https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def suggest_launcher(wanted: Slice) -> str:
    """Returns a sentence that names a launcher for a slice, or says that there is none."""
    if wanted.generation.name in RUNTIMES:
        return f"`tftpu launch tpu-vm --slice={wanted.name}` rents it as a TPU VM."
    if wanted.slices > 1 and wanted.single.hosts == 1:
        return "No launcher joins slices of one host: choose one slice, or slices of several hosts."
    return f"`tftpu launch gke --slice={wanted.name}` trains on it."
