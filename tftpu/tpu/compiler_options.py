"""XLA's options for programs that are sharded over a mesh of TPUs.

`python -m tests.benchmarks.compiled.sharded_cost` compiles models with and without them.
"""

import re
from collections.abc import Mapping

from tftpu.errors import UserError
from tftpu.tpu.slices import Generation

AUTO = "auto"

# Makes a product wait until its sharded operand has arrived completely. By default XLA multiplies
# what has arrived, in a loop of small products that keep the matrix units idle.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Lets SparseCores run collectives while TensorCores compute, as on tpu7x by default. Without these
# options, products wait for all gathers on v6e, and for most on v5p. MaxText sets them for a v6e-32
# (run_gemma4_e4b_rl.sh) and a v5p-128 (run_olmo_qwen3_30b_streaming_diloco.sh). v5e has no
# SparseCores: there the compiler fuses a gather with products that do not need it.
_OFFLOADED = "xla_tpu_enable_sparse_core_collective_offload_"
_GATHERS = ("all_gather", "2d_all_gather", "3d_all_gather")
_SUMS = ("reduce_scatter", "nd_reduce_scatter", "all_reduce")
_FUSED = "xla_tpu_enable_async_collective_fusion_fuse_"
ON_SPARSE_CORES = {
    **{f"{_OFFLOADED}{name}": "True" for name in (*_GATHERS, *_SUMS)},
    **{f"{_FUSED}{name}": "False" for name in ("all_gather", "reduce_scatter", "all_reduce")},
    "xla_tpu_use_tc_device_shape_on_sc": "True",
    "xla_sc_disable_megacore_partitioning": "True",
}
_OFFLOADING = ("v5p", "v6e")
# Memory of a core for one instruction, in KiB. Larger tiles read their operands less often. Larger
# values than these would hardly shorten the steps of Llama 8B, and take twice as long to compile.
_TILES = "xla_tpu_scoped_vmem_limit_kib"
_TILE_KIB = {"v5e": 32 * 1024, "v5p": 32 * 1024, "v6e": 96 * 1024, "tpu7x": 60 * 1024}


def choose_compiler_options(setting: str, generation: Generation | None) -> dict[str, str]:
    """Returns the options that a program is compiled with, by name.

    Args:
        setting: "auto" for the options of the generation, or a text for `parse_options`.
        generation: the generation of the TPU; None on other hardware, for which "auto" gives no
            options.

    Raises:
        UserError: the setting is not allowed.
    """
    if setting != AUTO:
        return parse_options(setting)
    if generation is None:
        return {}
    kib = _TILE_KIB.get(generation.name)
    tiles = {_TILES: str(kib)} if kib else {}
    exchange = ON_SPARSE_CORES if generation.name in _OFFLOADING else {}
    return _WHOLE_PRODUCTS | tiles | exchange


def parse_options(text: str) -> dict[str, str]:
    """Returns the options of a text such as "xla_a=1,xla_b=true"; "" has none.

    Raises:
        UserError: the text has another form.
    """
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:--)?(xla_\w+)=([^\s=]+)", part)
        if match is None:
            raise UserError(
                f"compiler_options has {part!r}: write 'auto', '' for no options, or XLA options "
                "with their values, as in 'xla_tpu_scoped_vmem_limit_kib=65536'."
            )
        value = match[2]  # XLA reads only True and False as truth values
        options[match[1]] = value.capitalize() if value in ("true", "false") else value
    return options


def as_text(options: Mapping[str, str]) -> str:
    """Returns options as a text that `parse_options` reads."""
    return ",".join(f"{name}={value}" for name, value in options.items())
