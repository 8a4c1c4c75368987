"""Steps of the JAX engine, compiled for slices: one program that the compiler divides."""

import functools
import json
from typing import Any

import pytest

from tests.support.programs import jax_process
from tests.support.programs.jax_preflight import BATCH, CLASSES, HIDDEN, INPUTS

pytestmark = [pytest.mark.slow, pytest.mark.compiles]

WEIGHTS = INPUTS * HIDDEN + HIDDEN * CLASSES
STATE = 3 * 4 * WEIGHTS  # bytes of the weights and of Adam's two moments


def printed(*arguments: str) -> Any:
    return json.loads(jax_process.output("programs.jax_preflight", *arguments, xla_flags=""))


@functools.cache
def report(mesh: str, slices: str, *options: str) -> list[dict]:
    return printed(mesh, slices, *options)["slices"]


def test_a_mesh_divides_what_the_devices_hold():
    [whole] = report("data:-1", "v5e-8")
    cut, four = report("fsdp:-1", "v5e-8,v5e-4")
    batch = BATCH // 8 * INPUTS * 4
    assert whole["hbm"]["arguments"] == pytest.approx(STATE + batch, rel=0.02)
    assert cut["hbm"]["arguments"] == pytest.approx(STATE / 8 + batch, rel=0.02)
    assert four["hbm"]["arguments"] == pytest.approx(STATE / 4 + 2 * batch, rel=0.02)


def test_the_work_of_a_device_is_its_part_of_the_whole():
    cut, four = report("fsdp:-1", "v5e-8,v5e-4")
    flops = 3 * 2 * BATCH * WEIGHTS
    assert cut["model_flops"] == flops / 8 and four["model_flops"] == flops / 4
    # The first layer needs no gradient of its input.
    expected = (3 * WEIGHTS - INPUTS * HIDDEN) * 2 * BATCH / 8
    assert cut["flops"] == pytest.approx(expected, rel=0.01)
    assert cut["collective_ms"] > 0
    layers = {row["name"] for row in cut["by_layer"]}
    assert {"hidden", "head", "(optimizer)"} <= layers


@pytest.mark.exhaustive
def test_ironwood_has_two_devices_a_chip():
    [found] = report("fsdp:-1", "tpu7x-8")
    assert found["fits"] and found["replicas"] == 8
    assert found["hbm"]["arguments"] == pytest.approx(STATE / 8 + BATCH // 8 * INPUTS * 4, rel=0.02)
    assert found["collective_ms"] > 0
    step_s = found["step_ms"] / 1e3
    assert found["mfu"] == pytest.approx(found["model_flops"] / step_s / (2307e12 / 2), rel=0.01)
    assert found["usd_per_1000_steps"] == pytest.approx(4 * 12 / 3600 * 1000 * step_s, rel=0.01)


def test_sparse_cores_exchange_beside_the_products():
    """The compiler's schedule: without the options a product waits for each gather."""
    [chosen] = report("fsdp:-1", "v6e-8")
    [waiting] = report("fsdp:-1", "v6e-8", "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000")
    assert 0 < chosen["collective_ms"] < 0.75 * waiting["collective_ms"]
    assert chosen["step_ms"] < 0.9 * waiting["step_ms"]


def test_two_slices_exchange_their_sums_over_the_network():
    one, two = report("data:-1", "v5e-8,2xv5e-8")
    [cut] = report("data:2,fsdp:-1", "2xv5e-8")
    assert two["replicas"] == 16 and two["mesh"] == "data:16" and cut["mesh"] == "data:2,fsdp:8"
    assert two["model_flops"] == cut["model_flops"] == one["model_flops"] / 2
    # Each of eight devices exchanges its eighth of the gradients, of float32, in either mesh.
    network = 4 * WEIGHTS / 8 / 3.1e9 * 1e3
    assert network < two["collective_ms"] - one["collective_ms"] < 2 * network
    assert network < cut["collective_ms"] < 2 * network + one["collective_ms"]
    [refused] = report("fsdp:-1", "2xv5e-8")
    assert "as in 'data:2,fsdp:-1'" in refused["error"]


def test_a_mesh_that_a_slice_cannot_have_is_said_in_its_row():
    fits, refused = report("fsdp:4", "v5e-4,v5e-8")
    assert fits["fits"]
    assert "'fsdp:4' needs 4 devices, but there are 8" in refused["error"]


@pytest.mark.exhaustive
def test_auto_cuts_the_model_as_little_as_the_memory_allows():
    [found] = report("auto", "wide")
    assert found["fits"] and found["mesh"] == "data:4,fsdp:2"
    [whole] = report("data:-1", "wide")
    assert not whole["fits"] and whole["mesh"] == "data:8"
    assert whole["advice"][0].startswith(
        "--config.cluster.mesh=data:4,fsdp:2 makes this batch fit: "
    )


def test_the_compiler_gets_its_options():
    chosen, _ = report("fsdp:-1", "v5e-8,v5e-4")
    limit = "xla_tpu_scoped_vmem_limit_kib"
    [small] = report("fsdp:-1", "v5e-8", f"{limit}=2048")
    assert small["compiler_options"] == {limit: "2048"} != chosen["compiler_options"]
    assert small["flops"] == chosen["flops"]
    assert small["estimated_cycles"] > 1.2 * chosen["estimated_cycles"]  # smaller tiles


def test_an_option_that_the_compiler_does_not_know_is_said():
    [refused] = report("fsdp:-1", "v5e-8", "xla_tpu_faster=true")
    assert not refused["compiles"] and "xla_tpu_faster" in refused["error"]


def test_devices_along_tensor_share_heads_and_tokens():
    found = printed("constraints")
    assert found.count("256x4x64") >= 3  # queries, keys and values of 4 heads, by one kernel
    assert found.count("2x512x256") >= 2  # what the attention and the MLP add to


def test_each_device_runs_the_kernels_on_its_examples_and_heads():
    # As in tests/kernels/test_flash.py: 2 examples a device, and one column of two heads.
    product = 2 * 2 * 2 * 3 * 256 * 256 * 128
    assert printed("kernels") == [2 * product, 5 * product]


@pytest.mark.exhaustive
def test_each_device_keeps_its_part_of_the_gradients():
    found = printed("scattered")
    parts = {shape for kind, shape in found if kind != "all-reduce"}
    assert {"bf16[2048,6144]", "bf16[2048,8192]", "bf16[8192,2048]"} <= parts
    assert not [shape for kind, shape in found if kind == "all-reduce" and "," in shape]


def test_inputs_of_blocks_wait_on_the_host_where_that_is_asked_for():
    width, blocks, tokens = 256, 3, 2 * 512
    assert printed("offloaded") == [0, blocks * tokens * width * 2]  # bytes, of bfloat16


def test_a_step_is_the_same_program_if_its_code_moves_in_its_file():
    assert printed("moved") == [True, True]  # so that the cache has it; with the names of layers


def test_a_base_in_8_bits_is_priced_and_one_in_4_is_refused():
    floats, rounded, refusal = printed("rounded")
    kernels = 12 * 256**2  # of the block's dense layers, cut by eight
    assert floats - rounded == pytest.approx(3 * kernels / 8, rel=0.05)  # and the scales
    assert "the JAX engine cannot price it" in refusal
