"""Compiles train steps of models larger than a chip for meshes of TPUs, and prices them.

    KERAS_BACKEND=jax python -m tests.benchmarks.compiled.sharded_cost [--options=SETTING] [ROW ...]

SETTING is as for `cluster.compiler_options`; without one, each row is compiled as a run would be.

Evidence: compiled. A row is one program for all devices of a slice; memory, time and model-FLOP
utilization (MFU) are those of one device, and so is the exchange that no computation hides.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import dataclasses
import sys
import time
from typing import Any

import keras
import tensorflow as tf

from tftpu import models
from tftpu.config import TrainConfig
from tftpu.config.mesh import DATA, FSDP, mesh_sizes
from tftpu.engines.jax.lower import JaxLowering
from tftpu.engines.lowered import LoweredStep
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import collectives
from tftpu.preflight.pricing.cost import price
from tftpu.preflight.pricing.instructions import list_within
from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.loops import Runs
from tftpu.tpu.compiler_options import AUTO
from tftpu.tpu.slices import Slice, parse_slice

TIME_LIMIT = 3000.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a slice.

    Attributes:
        size: name of the size.
        slice: the slice.
        mesh: as for `tftpu.connect`.
        examples: of a share of the batch.
        tokens: of an example; 0: images.
        fields: of the model.
        optimizer: of Keras, without its rate.
    """

    size: str
    slice: str
    mesh: str
    examples: int
    tokens: int
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: type[keras.optimizers.Optimizer] = keras.optimizers.AdamW


LARGE: dict[str, Any] = {"attention": "flash", "remat": "block"}
# The shapes of Llama 3 70B, and of ViT-g/14 with the zoo's ratio of widths.
LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672}
VIT_G = {"patch": 14, "layers": 40, "width": 1408, "heads": 16}
ROWS = {
    "1b-v5e-16": Row("llama_1b", "v5e-16", "fsdp:-1", 1, 8192, LARGE),
    "8b-v5e-64": Row("llama_8b", "v5e-64", "fsdp:-1", 1, 8192, LARGE),
    "8b-v5e-64-attention": Row(
        "llama_8b", "v5e-64", "fsdp:-1", 1, 8192, LARGE | {"remat": "attention"}
    ),
    "8b-v6e-8": Row("llama_8b", "v6e-8", "fsdp:-1", 3, 8192, LARGE),
    "8b-v6e-8-offload": Row("llama_8b", "v6e-8", "fsdp:-1", 3, 8192, LARGE | {"remat": "offload"}),
    "8b-v5p-64": Row("llama_8b", "v5p-64", "fsdp:-1", 2, 8192, LARGE | {"remat": "products"}),
    "8b-v5p-128": Row("llama_8b", "v5p-128", "fsdp:-1", 2, 8192, LARGE | {"remat": "products"}),
    "70b-v5e-256": Row("llama_8b", "v5e-256", "fsdp:-1", 1, 4096, LARGE | LLAMA_70B),
    "70b-v5p-128": Row("llama_8b", "v5p-128", "fsdp:-1", 4, 8192, LARGE | LLAMA_70B),
    "70b-v6e-256": Row("llama_8b", "v6e-256", "fsdp:-1", 1, 8192, LARGE | LLAMA_70B),
    "8b-128k-v5p-64": Row(
        "llama_8b", "v5p-64", "fsdp:4,sequence:8", 1, 131_072, LARGE | {"remat": "products"}
    ),
    "8b-128k-v6e-64": Row(
        "llama_8b", "v6e-64", "fsdp:4,sequence:16", 1, 131_072, LARGE | {"remat": "products"}
    ),
    "8b-1m-v5p-128": Row(
        "llama_8b", "v5p-128", "sequence:64", 1, 2**20, LARGE | {"remat": "products"}
    ),
    "70b-2xv5e-256": Row("llama_8b", "2xv5e-256", "data:2,fsdp:-1", 1, 4096, LARGE | LLAMA_70B),
    "gpt2_xl-v5e-16": Row("gpt2_xl", "v5e-16", "fsdp:-1", 8, 1024, {"remat": "block"}),
    # Its heads of 88 are none that the flash kernel takes.
    "vit_g-v5e-16": Row("vit_l16", "v5e-16", "fsdp:-1", 32, 0, {"remat": "block"} | VIT_G),
}
# Weak scaling: the same share of a batch on ever more chips. With AdamW's second moments 8 chips do
# not hold the model.
ROWS |= {
    f"8b-lion-v5e-{chips}": Row(
        "llama_8b", f"v5e-{chips}", "fsdp:-1", 1, 4096, LARGE, keras.optimizers.Lion
    )
    for chips in (8, 16, 32, 64, 128, 256)
}


def main(arguments: list[str]) -> None:
    """Prints a line for each row."""
    given = [a.removeprefix("--options=") for a in arguments if a.startswith("--options=")]
    setting = given[-1] if given else AUTO
    names = [a for a in arguments if not a.startswith("--")]
    for name in names or ROWS:
        print(f"{name:15} {measured(ROWS[name], setting)}", flush=True)


def measured(row: Row, setting: str) -> str:
    """Compiles a row with a setting of XLA's options; returns what was found."""
    target = parse_slice(row.slice)
    began = time.monotonic()
    step, compiled = compiled_row(row, setting)
    took = f"took {time.monotonic() - began:.0f} s, of which the compiler {compiled.seconds:.0f} s"
    if compiled.error:
        return f"does not compile: {compiled.error[:300]}; {took}"
    cost = price(step, compiled, target)
    available = cost.seconds * target.flops_per_s
    mfu = cost.model_flops / available
    with_attention = mfu + _attention_flops(row, target.replicas) / available
    limit = target.generation.hbm_limit / 2**30
    return (
        f"{cost.memory.total / 2**30:.2f} GiB of {limit:.2f}; "
        f"{cost.seconds:.3f} s a step, of which exchange {cost.collective_seconds:.3f} s; "
        f"{_sent(compiled.text, target) / 2**30:.1f} GiB sent; "
        f"MFU {mfu:.1%}, with attention {with_attention:.1%}; {took}"
    )


def _sent(text: str, target: Slice) -> float:
    """Returns the bytes that a chip sends in a step."""
    module = Module(text)
    total, seen = 0.0, set()
    for instruction, times, computation in Runs(module).iterate():
        within = list_within(module, instruction, computation)
        sent = sum(collectives.count_sent_bytes(i, inside, target) for i, inside in within)
        key = id(computation), collectives.find_key(instruction, within)
        if sent and key not in seen:  # fusions that start, carry on and end one share its key
            seen.add(key)
            # In a fused all-reduce each device keeps one part of the sum: a reduce-scatter.
            fused = any(i.opcode == "all-reduce" and i is not instruction for i, _ in within)
            fused = fused and not collectives.is_start(instruction, within)
            total += times * sent / (2 if fused else 1)
    return total


def _attention_flops(row: Row, devices: int) -> float:
    """Returns the FLOPs of a device in causal attention, which `model_flops` leaves out.

    Scores and mixed values are 4 FLOPs a channel for each pair of tokens, half of which is hidden,
    and the backward pass costs twice that.
    """
    if not row.tokens:
        return 0.0
    sizes: Any = models.config(row.size, **row.fields)
    mesh = mesh_sizes(row.mesh, devices)
    examples = row.examples * mesh[DATA] * mesh[FSDP]
    return 6 * sizes.layers * sizes.width * row.tokens**2 * examples / devices


def compiled_row(row: Row, setting: str = AUTO) -> tuple[LoweredStep, compiler.Compiled]:
    """Returns the train step of a row, and what the compiler made of it."""
    target = parse_slice(row.slice)
    lowering = JaxLowering(row.mesh, setting)
    options = TrainConfig(global_clipnorm=1.0)
    step = lowering.build(
        lambda: model(row), batch(row), target.replicas, "mixed_bfloat16", options
    ).lower()
    chosen = lowering.choose_compiler_options(target)
    return step, compiler.compile_program(step, target, chosen, TIME_LIMIT)


def model(row: Row) -> keras.Model:
    """Builds and compiles the model of a row."""
    built = models.build(row.size, **row.fields)
    built.compile(row.optimizer(1e-4, weight_decay=0.1), SmoothedCrossentropy())
    return built


def batch(row: Row) -> Any:
    """Returns the spec of one share of the batch."""
    if row.tokens:
        return (tf.TensorSpec((row.examples, row.tokens), tf.int32),) * 2
    images = tf.TensorSpec((row.examples, 224, 224, 3), tf.bfloat16)
    return images, tf.TensorSpec((row.examples,), tf.int32)


if __name__ == "__main__":
    main(sys.argv[1:])
