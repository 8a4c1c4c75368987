"""Slices under Google's names, and the table of generations."""

import pytest

from tftpu.errors import UserError
from tftpu.tpu.slices import GENERATIONS, parse_slice


@pytest.mark.parametrize(
    ("name", "chips", "replicas", "topology"),
    [
        ("v2-8", 4, 8, "v2:2x2"),  # v2 and v3 count cores, two per chip
        ("v3-8", 4, 8, "v3:2x2"),
        ("v3-32", 16, 32, "v3:4x4"),
        ("v4-16", 8, 8, "v4:2x2x2"),  # v4 and v5p count cores, which work as one device
        ("v5e-1", 1, 1, "v5e:1x1"),  # v5e and v6e count chips
        ("v5e-8", 8, 8, "v5e:2x4"),
        ("v5litepod-8", 8, 8, "v5e:2x4"),
        ("v5p-8", 4, 4, "v5p:2x2x1"),  # counts cores, but a chip is one device
        ("v6e-256", 256, 256, "v6e:16x16"),
        ("tpu7x-8", 4, 8, "tpu7x:2x2x1"),  # counts cores, two devices a chip
        ("tpu7x-512", 256, 512, "tpu7x:4x8x8"),
    ],
)
def test_a_name_gives_the_number_of_chips_and_replicas(name, chips, replicas, topology):
    found = parse_slice(name)
    assert (found.chips, found.replicas, found.topology) == (chips, replicas, topology)


@pytest.mark.parametrize(
    ("name", "hosts", "chips"),
    [
        ("v2-8", 1, 4),
        ("v3-32", 4, 4),
        ("v4-16", 2, 4),
        ("v5e-1", 1, 1),
        ("v5e-4", 1, 4),
        ("v5e-8", 1, 8),
        ("v5e-16", 4, 4),  # not two hosts of eight chips
        ("v5p-8", 1, 4),
        ("v5p-64", 8, 4),
        ("v6e-256", 64, 4),
        ("tpu7x-8", 1, 4),
        ("tpu7x-16", 2, 4),
    ],
)
def test_a_slice_has_the_hosts_that_its_documentation_counts(name, hosts, chips):
    assert (parse_slice(name).hosts, parse_slice(name).chips_per_host) == (hosts, chips)


def test_several_slices_have_the_devices_of_all():
    two = parse_slice("2xv5litepod-256")
    assert (two.name, two.slices, two.chips, two.replicas) == ("2xv5e-256", 2, 512, 512)
    assert (two.hosts, two.chips_per_host, two.topology) == (128, 4, "v5e:16x16")
    assert two.single == parse_slice("1xv5e-256") == parse_slice("v5e-256")


def test_a_name_with_an_x_is_no_number_of_slices():
    one, two = parse_slice("tpu7x-128"), parse_slice("2xtpu7x-128")
    assert (two.slices, two.replicas, two.hosts) == (2, 256, 32)
    assert two.single == one == one.single == parse_slice("1xtpu7x-128")


def test_a_replica_has_its_share_of_the_chip():
    v3, v5e = parse_slice("v3-8"), parse_slice("v5e-8")
    assert v3.flops_per_s == 123e12 / 2
    assert v3.bytes_per_s == 900e9 / 2
    assert v5e.flops_per_s == 197e12
    assert parse_slice("tpu7x-8").bytes_per_s == 3690e9  # of two cores, each with its own HBM


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x-8", "write the generation and the size"),
        ("v5lite-8", "Did you mean"),
        ("v5-e8", "Did you mean 'v5e-8'"),
        ("V5E-8", "Did you mean 'v5e-8'"),
        ("v6e-8x", "Did you mean 'v6e-8'"),
        ("v8-8", "The generations are v2, v3"),
        ("v7x-8", "Did you mean 'tpu7x-8'"),
        ("7x-8", "Did you mean 'tpu7x-8'"),
        ("tpu7-8", "Did you mean 'tpu7x-8'"),
        ("v7-8", "Did you mean 'tpu7x-8'"),
        ("TPU7x-8", "Did you mean 'tpu7x-8'"),
        ("ironwood-8", "Did you mean 'tpu7x-8'"),
        ("Trillium-8", "Did you mean 'v6e-8'"),
        ("2xIronwood-128", "Did you mean 'tpu7x-128'"),
        ("tpu7x-4x4x4", "Did you mean 'tpu7x-128'"),  # xpk's name
        ("tpu7x-12", "Did you mean 'tpu7x-8' or 'tpu7x-16'"),
        ("tpu", "The generations are v2, v3"),
        ("v6e-12", "Did you mean 'v6e-8' or 'v6e-16'"),
        ("v6e-15", "Did you mean 'v6e-16' or 'v6e-8'"),
        ("v5litepod-512", "Did you mean 'v5e-256'"),
        ("v3-7", "v3 slices have 8, 32, 64"),
        ("v3-4", "2048 cores"),
        ("0xv5e-256", "names no slices: write v5e-256, or 2xv5e-256"),
        ("2xv5e-7", "There is no v5e-7"),
        ("2xv3-8", "not joined by a network"),
        ("v5e-2", "1, 4, 8, 16, 32, 64, 128, 256 chips"),
    ],
)
def test_an_unknown_slice_fails_with_the_alternatives(name, message):
    with pytest.raises(UserError, match=message):
        parse_slice(name)


def test_peak_flops_equal_the_clock_times_the_flops_of_the_matrix_units():
    # Each unit does 128 x 128 multiply-adds per cycle. Those of v6e and tpu7x are of 256 x 256.
    units = {"v2": 2 * 1, "v3": 2 * 2, "v4": 2 * 4, "v5e": 4, "v5p": 2 * 4}
    units |= {"v6e": 2 * 4 * 2, "tpu7x": 2 * 2 * 4 * 2}  # and do two a cycle
    for name, generation in GENERATIONS.items():
        flops = 2 * 128 * 128 * units[name]
        assert flops * generation.clock_ghz / 1e3 == pytest.approx(generation.tflops, rel=0.02)


def test_a_device_has_its_part_of_the_hosts_memory_where_that_is_known():
    assert parse_slice("v5e-8").host_limit == 48 * 10**9
    assert parse_slice("v6e-1").host_limit == 176 * 10**9
    assert parse_slice("v5p-8").host_limit is None
