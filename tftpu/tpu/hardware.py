"""Chips of a run: peak performance and price, where they are known."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tftpu.tpu.slices import GENERATIONS, Generation

GOOGLE = "0x1ae0"  # Google's PCI vendor id
# PCI device ids of TPUs, from JAX's list. v2 and v3 share one.
_PCI_DEVICES = {
    **{"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"},
    "0x0076": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The chips that a run uses.

    Attributes:
        chips: number of TPU chips; number of devices if the generation is None.
        generation: the TPU's generation; None on other hardware, or if it could not be detected.
        is_tpu: whether the chips are TPUs.
    """

    chips: int
    generation: Generation | None = None
    is_tpu: bool = False

    def compute_mfu(self, flops_per_s: float) -> float | None:
        """Returns the model FLOPs utilization: the fraction of the chips' bfloat16 peak.

        Args:
            flops_per_s: model FLOPs per second, of all chips together.

        Returns:
            None if the generation is not known.
        """
        if self.generation is None:
            return None
        return flops_per_s / (self.chips * self.generation.tflops * 1e12)

    def compute_price(self, seconds: float) -> float | None:
        """Returns the on-demand price of the chips for `seconds`, in US dollars.

        Returns None if the generation is not known.
        """
        if self.generation is None:
            return None
        return self.chips * self.generation.usd_hour * seconds / 3600


def find_hardware(data_shards: int, is_tpu: bool) -> Hardware:
    """Returns the hardware behind an engine's devices.

    Args:
        data_shards: number of devices.
        is_tpu: whether the devices are TPU cores.
    """
    if not is_tpu:
        return Hardware(data_shards)
    generation = GENERATIONS.get(find_attached_tpu() or "")
    # Not `generation.counted`, which is 2 for v5p, whose two cores are one device.
    chips = data_shards // generation.cores if generation else data_shards
    return Hardware(chips, generation, is_tpu=True)


def find_attached_tpu(root: str = "/", environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the generation of this host's TPU, such as "v5e".

    The environment variable TPU_ACCELERATOR_TYPE takes precedence over the PCI devices.

    Args:
        root: root of the file system.
        environ: environment variables; None: those of this process.

    Returns:
        None if the variable is not set and no known TPU is found.
    """
    environ = os.environ if environ is None else environ
    kind = environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
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
