"""Compiles MaxText's own train step of Llama 3.1 8B for a v6e-8, for `maxtext_cost` to price.

    python tests/benchmarks/compiled/maxtext_step.py --sources=FOLDER --out=FILE

Runs in an environment of MaxText's, with a checkout of https://github.com/AI-Hypercomputer/maxtext
in FOLDER: on 2026-11-23 commit e591f30c, with jax 0.10.2 and libtpu 0.0.42.1. Its public recipe for
a v6e-8, `llama3_1_8b_8192_no_collective_matmul` in benchmarks/maxtext_trillium_model_configs.py, is
compiled with the options of XLA that belong to it. Newer releases of libtpu refuse three of these
on a v6e, and find no room for the arrays that the recipe moves to the host.

Evidence: compiled.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

SLICE = "v6e-8"
MODEL = {
    "model_name": "llama3.1-8b",
    "per_device_batch_size": 3,
    "max_target_length": 8192,
    "ici_fsdp_parallelism": -1,
    "attention": "flash",
    "use_iota_embed": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "compile_topology": SLICE,
    "compile_topology_num_slices": 1,
    "run_name": "priced",
}
# Of its recipe: what the backward pass finds on the host, and blocks of 2048 in attention.
KEPT = ("decoder_layer_input", "out_proj", "query_proj", "key_proj", "value_proj")
BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
RECIPE = {
    "remat_policy": "custom",
    **dict.fromkeys(KEPT, "offload"),
    **{f"sa_block_{name}": 2048 for name in BLOCKS},
    "sa_use_fused_bwd_kernel": True,
}
FLAGS = (
    *("DENSE_VMEM_LIMIT_FLAG", "LAYOUT_FOR_ALL_REDUCE_SCATTER", "DATA_PARALLEL_OVERLAP"),
    *("CF_FOR_ALL_GATHER", "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE"),
    *("HOST_OFFLOAD_FLAGS", "DISABLE_COLLECTIVE_MATMUL"),
)
REFUSED = "--xla_sc_disjoint_spmem"  # libtpu 0.0.42.1 knows no such option


def main() -> None:
    """Writes the program, and prints the seconds it took and its memory."""
    parser = argparse.ArgumentParser(description="Compiles MaxText's own train step.")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": SLICE,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "DECOUPLE_GCLOUD": "TRUE",
    }
    sys.path[:0] = [str(given.sources / "src"), str(given.sources)]
    flags = importlib.import_module("benchmarks.xla_flags_library")
    train_compile: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    every = " ".join(getattr(flags, name) for name in FLAGS).split()
    options = dict(flag[2:].split("=") for flag in every if not flag.startswith(REFUSED))
    train_compile.jit_and_compile = _compiling(given.out, options)
    settings = [f"{name}={value}" for name, value in (MODEL | RECIPE).items()]
    base = given.sources / "src" / "maxtext" / "configs" / "base.yml"
    outputs = f"base_output_directory={given.out.parent}"
    train_compile.main(["train_compile", str(base), outputs, *settings])


def _compiling(out: Path, options: dict[str, str]) -> Any:
    """Returns a stand-in for MaxText's function that compiles, which gives it no options."""
    import jax

    def compile_(step, args, kwargs, mesh, inputs, outputs, static, donated, config, rules):
        with jax.set_mesh(mesh), rules:
            jitted = jax.jit(
                step,
                in_shardings=inputs,
                out_shardings=outputs,
                static_argnums=static,
                donate_argnums=donated,
            )
            lowered = jitted.lower(*args, **kwargs)
        began = time.monotonic()
        compiled = lowered.compile(compiler_options=options)
        found = compiled.memory_analysis()
        device = found.peak_memory_in_bytes - found.host_temp_size_in_bytes
        print(
            f"compiled in {time.monotonic() - began:.0f} s; at the peak at least "
            f"{device / 2**30:.2f} GiB, and {found.host_temp_size_in_bytes / 2**30:.2f} GiB on the "
            "host",
            flush=True,
        )
        [module] = compiled.runtime_executable().hlo_modules()
        out.write_text(module.to_string())
        os._exit(0)  # MaxText would save the program and load it

    return compile_


if __name__ == "__main__":
    main()
