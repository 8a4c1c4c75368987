"""The text that describes a mesh."""

import math

import pytest

from tftpu.config import ClusterConfig
from tftpu.config.mesh import list_meshes, mesh_sizes, parse_mesh
from tftpu.errors import UserError


@pytest.mark.parametrize(
    "text, sizes",
    [
        (None, (8, 1, 1, 1)),
        ("data:8", (8, 1, 1, 1)),
        ("fsdp:8", (1, 8, 1, 1)),
        ("fsdp:-1", (1, 8, 1, 1)),
        ("tensor:2, fsdp:2 ,data:2", (2, 2, 1, 2)),
        ("data:2,fsdp:-1", (2, 4, 1, 1)),
        ("data:8,fsdp:-1", (8, 1, 1, 1)),
        ("fsdp:2,sequence:-1", (1, 2, 4, 1)),
    ],
)
def test_sizes(text, sizes):
    assert tuple(mesh_sizes(text, 8).values()) == sizes


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "fdsp:8",
            r"an unknown axis 'fdsp'. The axes are data, fsdp, sequence, .* Did you mean 'fsdp'\?",
        ),
        ("fsdp", "the size '' for 'fsdp'"),
        ("fsdp:0", "the size '0' for 'fsdp': give a positive whole number, or -1"),
        ("fsdp:-2", "the size '-2'"),
        ("fsdp:²", "the size '²'"),
        ("", "an unknown axis ''"),
        ("data:2,data:4", "names the axis 'data' twice"),
        ("data:-1,fsdp:-1", "size -1 several times"),
    ],
)
def test_what_is_no_mesh(text, message):
    with pytest.raises(UserError, match=message):
        parse_mesh(text)
    with pytest.raises(UserError, match=message):
        ClusterConfig(mesh=text).validate()


@pytest.mark.parametrize("text", ["fsdp:4", "fsdp:16", "data:3,fsdp:-1", "data:16,fsdp:-1"])
def test_sizes_that_do_not_use_every_device(text):
    with pytest.raises(UserError, match=r"devices, but there are 8: the product of its sizes"):
        mesh_sizes(text, 8)


def test_a_mesh_is_for_the_jax_engine():
    with pytest.raises(UserError, match="works only with the JAX engine"):
        ClusterConfig(engine="tensorflow", mesh="fsdp:8").validate()
    with pytest.raises(UserError, match=r"engine.*'jx'.*Did you mean 'jax'"):
        ClusterConfig(engine="jx").validate()


def test_the_shares_that_a_mesh_implies():
    assert ClusterConfig(mesh="data:2,fsdp:4,tensor:2").known_data_shards == 8
    assert ClusterConfig(mesh="data:2,fsdp:-1").known_data_shards == 2
    assert ClusterConfig(mesh="fsdp:2,sequence:4").known_data_shards == 2
    assert ClusterConfig(virtual_devices=4).known_data_shards == 4


def test_the_meshes_of_a_slice_use_every_device_once():
    assert list_meshes(1) == ["data:1"]
    assert list_meshes(4) == ["data:4", "data:2,fsdp:2", "fsdp:4"]
    found = list_meshes(8, most_tensor=8)
    assert len(found) == len(set(found)) == 10  # ways to write 8 as a product of three
    assert all(math.prod(parse_mesh(mesh).values()) == 8 for mesh in found)


def test_between_slices_only_data_is_divided():
    found = list_meshes(8, slices=2, most_tensor=4)
    assert found == ["data:8", "data:4,fsdp:2", "data:2,fsdp:4", "data:4,tensor:2"] + [
        "data:2,fsdp:2,tensor:2",
        "data:2,tensor:4",
    ]
