"""What the chips of a run can do at most, and what they cost, where that is known."""

import dataclasses
import os
from pathlib import Path

from tftpu.tpu.slices import GENERATIONS, Generation

GOOGLE = "0x1ae0"  # PCI vendor
# PCI devices of the TPUs, as JAX lists them; v2 and v3 share one.
_PCI_DEVICES = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The chips that a run works on.

    Attributes:
        chips: how many; devices where it is no TPU.
        generation: of the TPU; None: no TPU, or one that does not say what it is.
    """

    chips: int
    generation: Generation | None = None
    is_tpu: bool = False

    def mfu(self, flops_per_s: float) -> float:
        """The share of the peak of a known generation that so many model FLOPs a second are."""
        return flops_per_s / (self.chips * self.generation.tflops * 1e12)

    def usd(self, seconds: float) -> float | None:
        """What the chips cost on demand for so long, US dollars; None: not known."""
        if self.generation is None:
            return None
        return self.chips * self.generation.usd_hour * seconds / 3600


def of_devices(data_shares: int, is_tpu: bool) -> Hardware:
    """Returns the hardware of a run.

    Args:
        data_shares: number of devices that share a global batch.
        is_tpu: whether they are cores of a TPU.
    """
    if not is_tpu:
        return Hardware(data_shares)
    generation = GENERATIONS.get(attached_tpu() or "")
    # The two cores of a v5p chip are one replica.
    chips = data_shares // generation.cores if generation else data_shares
    return Hardware(chips, generation, is_tpu=True)


def attached_tpu(root: str = "/") -> str | None:
    """The generation of this host's TPU, "v5e": by its environment, else by its PCI device.

    Args:
        root: of the file system.
    """
    kind = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    if kind:
        return kind.replace("v5litepod", "v5e")
    for device in sorted(Path(root, "sys/bus/pci/devices").glob("*")):
        try:
            if (device / "vendor").read_text().strip() == GOOGLE:
                found = _PCI_DEVICES.get((device / "device").read_text().strip())
                if found:
                    return found
        except OSError:
            continue
    return None
