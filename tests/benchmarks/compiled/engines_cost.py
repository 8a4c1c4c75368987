"""Compares the cost of the same train step on both engines, compiled for one v5e core.

    python -m tests.benchmarks.compiled.engines_cost [ROW ...]

Evidence: compiled. Cycles are the compiler's estimate, with loops multiplied. Each engine lowers in
its own process, as Keras has one backend per process.
"""

import json
import os
import subprocess
import sys
from typing import Any

SLICE = "v5e-1"
# Name of the size, its fields, and examples.
ROWS: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet50": ("resnet50", {"norm_batch": 128}, 128),
    "gpt2": ("gpt2_small", {"attention": "plain"}, 8),
    "gpt2-flash": ("gpt2_small", {"attention": "flash"}, 8),
    "vit": ("vit_b16", {"attention": "plain"}, 64),
}


def main(names: list[str]) -> None:
    """Prints a line for each row: cycles and memory of both engines, and their ratios."""
    for name in names or ROWS:
        tensorflow, jax = (_measured(name, engine) for engine in ("tensorflow", "jax"))
        cycles, memory = (jax[key] / tensorflow[key] for key in ("cycles", "hbm"))
        print(
            f"{name:11} {SLICE}: {tensorflow['cycles'] / 1e6:,.1f} and {jax['cycles'] / 1e6:,.1f} "
            f"Mcycles, JAX / TensorFlow {cycles:.3f}; "
            f"{tensorflow['hbm'] / 2**20:,.0f} and {jax['hbm'] / 2**20:,.0f} MiB, {memory:.3f}",
            flush=True,
        )


def _measured(name: str, engine: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.compiled.engines_cost",
        name,
        f"--engine={engine}",
    ]
    environment = {**os.environ, "KERAS_BACKEND": engine, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, engine: str) -> dict[str, float]:
    """Returns the cycles and bytes of HBM of a row on an engine, whose backend Keras runs on."""
    import keras
    import tensorflow as tf

    from tests.benchmarks.compiled.cycles import cycles_of
    from tftpu import models
    from tftpu.config import ClusterConfig, TrainConfig
    from tftpu.engines import selection
    from tftpu.optim.losses import SmoothedCrossentropy
    from tftpu.preflight.compiling import compiler
    from tftpu.preflight.pricing.cost import parse_memory_stats, price
    from tftpu.tpu.slices import parse_slice

    size, fields, examples = ROWS[name]

    def model() -> keras.Model:
        built = models.build(size, **fields)
        optimizer = (
            keras.optimizers.SGD(0.1, momentum=0.9)
            if size.startswith("resnet")
            else keras.optimizers.AdamW(1e-3, weight_decay=0.1)
        )
        built.compile(optimizer, SmoothedCrossentropy())
        return built

    if size.startswith("gpt2"):
        batch = (tf.TensorSpec((examples, 1024), tf.int32),) * 2
    else:
        batch = (
            tf.TensorSpec((examples, 224, 224, 3), tf.bfloat16),
            tf.TensorSpec((examples,), tf.int32),
        )
    lowering = selection.choose_lowering(ClusterConfig(engine=engine))
    step = lowering.build(model, batch, 1, "mixed_bfloat16", TrainConfig()).lower()
    target = parse_slice(SLICE)
    # Without XLA's options for meshes, which only one engine has: it compares programs.
    compiled = compiler.compile_program(step, target)
    if compiled.error:
        raise SystemExit(f"{name} on {engine}: {compiled.error}")
    cost = price(step, compiled, target)
    return {"cycles": cycles_of(cost, target), "hbm": parse_memory_stats(compiled.memory).total}


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and given[-1].startswith("--engine="):
        print(json.dumps(measure(given[0], given[-1].partition("=")[2])))
    else:
        main(given)
