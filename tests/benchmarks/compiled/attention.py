"""Compares train steps with plain attention and with the kernel, for the choice of `auto`.

    python -m tests.benchmarks.compiled.attention [--rows=gpt_256,vit_224] [--slices=v3-8,v5e-8]

Evidence: compiled. Each row compiles a complete train step of two blocks, with 16,384 tokens or 64
pictures a device in bfloat16, once with `attention=plain` and once with `attention=flash`, and
prints the predicted time and the memory of the second over those of the first. `auto` is what
`tftpu.kernels` chooses for all generations at once; where that costs over 2 % more, the line says
so. A row takes 5 to 15 minutes on 2 cores; its programs are cached.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
import tensorflow as tf

import tftpu
from tftpu import models, sharding
from tftpu.kernels import KINDS_OF_ATTENTION, functions
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.preflight.report import Report

DEVICES = 8  # of each slice, so that all of them share a lowered step
SLICES = "v2-8,v3-8,v4-16,v5e-8,v5p-16,v6e-8"
TOKENS, PICTURES = 16_384, 64  # of a device
MARGIN = 1.02
SMALL = {"layers": 2, "vocabulary": 512}
# Heads of 64 channels, and heads of 128 whose keys four of them share.
FAMILIES = {
    "gpt": ("gpt2_small", SMALL, 64),
    "llama": ("llama_1b", {**SMALL, "width": 1024, "heads": 8, "kv_heads": 2, "hidden": 2048}, 128),
    "bert": ("bert_base", {**SMALL, "head": "classes"}, 64),
    "vit": ("vit_s16", {"layers": 2}, 64),
}
ROWS = (
    *("gpt_128", "gpt_256", "gpt_512", "gpt_1024", "gpt_2048", "gpt_4096"),
    *("llama_256", "llama_1024", "llama_4096"),
    *("bert_128", "bert_512", "vit_224", "vit_384"),
)


def measure(row: str, slices: list[str], attention: str) -> Report:
    """Compiles the step of a row for slices."""
    family, size = row.split("_")
    name, fields, _ = FAMILIES[family]
    field = "image_size" if family == "vit" else "context"

    def build() -> keras.Model:
        model = models.build(name, attention=attention, **{**fields, field: int(size)})
        model.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.1), SmoothedCrossentropy())
        return model

    options = tftpu.preflight.PreflightOptions(precision="mixed_bfloat16")
    return tftpu.preflight.check(build, make_batch(family, int(size)), slices, options)


def make_batch(family: str, size: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Returns the specs of a global batch of tokens or pictures and their labels."""
    if family == "vit":
        count = PICTURES * DEVICES
        pictures = tf.TensorSpec((count, size, size, 3), tf.bfloat16)
        return pictures, tf.TensorSpec((count,), tf.int32)
    count = TOKENS // size * DEVICES
    tokens = tf.TensorSpec((count, size), tf.int32)
    return tokens, tf.TensorSpec((count,), tf.int32) if family == "bert" else tokens


def is_kernel_chosen(row: str) -> bool:
    """Returns whether `attention=auto` computes a row by a kernel."""
    family, size = row.split("_")
    time = int(size) if family != "vit" else (int(size) // 16) ** 2 + 1
    sizes: Any = models.config(FAMILIES[family][0])
    with sharding.compiling_for("tpu"):
        tokens = keras.KerasTensor((1, time, 64 * sizes.heads))
        if family in ("bert", "vit") and functions.takes_whole(tokens, sizes.heads):
            return True  # the kernel of short sequences
    return functions.is_cheaper(time, FAMILIES[family][2], causal=family in ("gpt", "llama"))


def compare(row: str, slices: list[str], show: Callable[[str], None]) -> None:
    """Shows a line for each slice."""
    reports = [measure(row, slices, kind).slices for kind in KINDS_OF_ATTENTION]
    auto = is_kernel_chosen(row)
    for plain, flash in zip(*reports):
        name = plain.slice
        if not (plain.fits and flash.fits):
            refused = [k for k, r in zip(KINDS_OF_ATTENTION, (plain, flash)) if not r.fits]
            error = (flash.error or plain.error)[:90]
            show(f"{row:<11} {name:<7} {' and '.join(refused)} not: {error}")
            continue
        time, memory = flash.step_ms / plain.step_ms, flash.hbm_bytes / plain.hbm_bytes
        wrong = time > MARGIN if auto else time < 1 / MARGIN
        show(
            f"{row:<11} {name:<7} {plain.step_ms:8.2f} {flash.step_ms:8.2f} {time:6.2f} "
            f"{memory:7.2f} {'flash' if auto else 'plain'}{'  DEARER' if wrong else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--slices", default=SLICES)
    given = parser.parse_args()
    print(f"{'step':<11} {'on':<7} {'plain ms':>8} {'flash ms':>8}   time  memory auto", flush=True)
    for row in given.rows.split(","):
        compare(row, given.slices.split(","), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
