"""The hardware behind an engine's devices."""

import pytest

from tftpu.tpu.hardware import Hardware, find_hardware
from tftpu.tpu.slices import GENERATIONS


@pytest.mark.parametrize(
    ("accelerator", "devices", "chips"),
    [("v3-8", 8, 4), ("v5litepod-8", 8, 8), ("v5p-8", 4, 4), ("tpu7x-8", 8, 4)],
)
def test_a_tpu_is_described_by_its_chips(accelerator, devices, chips, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    generation = GENERATIONS[accelerator.partition("-")[0].replace("v5litepod", "v5e")]
    assert find_hardware(devices, is_tpu=True) == Hardware(chips, generation, is_tpu=True)


def test_an_unknown_tpu_counts_devices(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v99-8")
    assert find_hardware(8, is_tpu=True) == Hardware(8, None, is_tpu=True)


def test_other_hardware_has_devices_but_neither_price_nor_peak():
    cpu = find_hardware(2, is_tpu=False)
    assert cpu == Hardware(2)
    assert cpu.compute_mfu(1e12) is None and cpu.compute_price(3600) is None
