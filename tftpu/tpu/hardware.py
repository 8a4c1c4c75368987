"""What the chips of a run can do at most, and what they cost, where that is known."""

import dataclasses
import os
from pathlib import Path

import tensorflow as tf

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

    def mfu(self, flops_per_s: float) -> float:
        """The share of the peak of a known generation that so many model FLOPs a second are."""
        return flops_per_s / (self.chips * self.generation.tflops * 1e12)

    def usd(self, seconds: float) -> float | None:
        """What the chips cost on demand for so long, US dollars; None: not known."""
        if self.generation is None:
            return None
        return self.chips * self.generation.usd_hour * seconds / 3600


def of(strategy: tf.distribute.Strategy) -> Hardware:
    """The hardware of a strategy."""
    replicas = strategy.num_replicas_in_sync
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return Hardware(replicas)
    generation = GENERATIONS.get(attached_tpu() or "")
    # Of a v5p, the two cores of a chip are one replica.
    return Hardware(replicas // generation.cores if generation else replicas, generation)


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
