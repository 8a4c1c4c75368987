"""XLA's options for programs that are divided over a mesh."""

import pytest

from tftpu.config import ClusterConfig
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.tpu.compiler_options import as_text, choose_compiler_options, parse_options
from tftpu.tpu.slices import GENERATIONS


def test_auto_is_for_tpus_alone():
    assert choose_compiler_options("auto", None) == {}
    names = [set(choose_compiler_options("auto", g)) for g in GENERATIONS.values()]
    assert all("xla_jf_spmd_threshold_for_windowed_einsum_mib" in found for found in names)


def test_tiles_leave_room_in_the_memory_of_a_core():
    vmem = {"v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}  # MiB a core, by JAX's tpu_info
    for name, mib in vmem.items():
        chosen = choose_compiler_options("auto", GENERATIONS[name])
        assert 0.2 < int(chosen["xla_tpu_scoped_vmem_limit_kib"]) / 1024 / mib < 1


def test_sparse_cores_exchange_where_there_are_some_that_do_not_by_default():
    gather = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    found = {g.name for g in GENERATIONS.values() if gather in choose_compiler_options("auto", g)}
    assert found == {"v5p", "v6e"}
    for name in found:
        chosen = choose_compiler_options("auto", GENERATIONS[name])
        assert chosen[gather] == "True"  # as XLA reads it
        assert chosen["xla_tpu_enable_async_collective_fusion_fuse_all_gather"] == "False"


def test_what_is_set_replaces_what_auto_chooses():
    v6e = GENERATIONS["v6e"]
    assert choose_compiler_options("", v6e) == {}
    assert choose_compiler_options("xla_a=1, --xla_b=true", v6e) == {"xla_a": "1", "xla_b": "True"}
    assert parse_options(as_text(choose_compiler_options("auto", v6e))) == choose_compiler_options(
        "auto", v6e
    )


@pytest.mark.parametrize("text", ["none", "xla_a", "xla_a=", "threads=4", "xla_a=1 xla_b=2"])
def test_what_is_no_option(text):
    with pytest.raises(UserError, match="write 'auto', '' for no options, or XLA options"):
        ClusterConfig(mesh="fsdp:8", compiler_options=text).validate()


def test_options_are_for_the_jax_engine():
    with pytest.raises(UserError, match="this run uses the TensorFlow engine"):
        selection.choose_backend(ClusterConfig(compiler_options="xla_a=1"))
