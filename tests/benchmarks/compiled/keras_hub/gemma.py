"""Compiles the train step of KerasHub's Gemma 3 as Keras's JAX `fit` runs it, and as tftpu does.

    python -m tests.benchmarks.compiled.keras_hub.gemma [--rows=ROW,...] [--batch=N] [--tokens=N]

The rows are the keys of `OURS`, and "keras" for Keras's `fit` under `DataParallel`. "zoo" is the
zoo's Llama of these widths, and "two-norms" a Gemma with the norms of that alone. All have the
same batch, optimizer and dtype policy, and the same compiler and prices; v5e-8. The rows of `LORA`
are larger models, of which only adapters are trained, each on its own slice.

Evidence: compiled.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools
import sys
from typing import Any

import jax
import keras
import tensorflow as tf

from tests.benchmarks.compiled.keras_hub.llama import PRECISION, compile_model, lower_fit, say
from tftpu import models
from tftpu.config import TrainConfig
from tftpu.engines.jax.lower import JaxLowering
from tftpu.tpu.slices import parse_slice

SLICE, DEVICES = "v5e-8", 8
RANK = 8  # of the adapters
# What Hugging Face's google/gemma-3-1b-pt has in its config.json.
GEMMA3_1B: dict[str, Any] = {
    "vocabulary_size": 262_144,
    "image_size": None,
    "num_layers": 26,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 1152,
    "intermediate_dim": 6912,
    "head_dim": 256,
    "use_query_key_norm": True,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 512,
    "vision_encoder": None,
}
# google/gemma-3-12b-pt and google/gemma-3-27b-pt, without the encoder of images; with their slices.
LORA: dict[str, tuple[str, dict[str, Any]]] = {
    "12b-lora": (
        "v5e-8",
        {
            "num_layers": 48,
            "num_query_heads": 16,
            "num_key_value_heads": 8,
            "hidden_dim": 3840,
            "intermediate_dim": 15_360,
            "sliding_window_size": 1024,
        },
    ),
    "27b-lora": (
        "v6e-8",
        {
            "num_layers": 62,
            "num_query_heads": 32,
            "num_key_value_heads": 16,
            "hidden_dim": 5376,
            "intermediate_dim": 21_504,
            "head_dim": 128,
            "sliding_window_size": 1024,
        },
    ),
}
# Gemma's norms that the zoo's Llama does not have.
NORMS = ("use_query_key_norm", "use_post_ffw_norm", "use_post_attention_norm")
TWO_NORMS = dict[str, Any].fromkeys(NORMS, False)
OTHERS = LORA | {"two-norms": (SLICE, TWO_NORMS)}
OURS = {
    "none": {},
    "block": {"remat": "block"},
    "products": {"remat": "products"},
    "scan": {"scan": "block"},
    "scan-block": {"scan": "block", "remat": "block"},
    "zoo": {},
}


def main(arguments: list[str]) -> None:
    """Prints cycles and memory of each program."""
    given = dict(argument.removeprefix("--").split("=") for argument in arguments)
    batch, tokens = int(given.get("batch", 8)), int(given.get("tokens", 1024))
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for row in given.get("rows", "keras,none,scan-block").split(","):
        if row == "keras":
            devices = [f"cpu:{i}" for i in range(DEVICES)]
            mesh = keras.distribution.DeviceMesh((DEVICES,), ["batch"], devices)
            step = lower_fit(
                build_gemma, keras.distribution.DataParallel(device_mesh=mesh), batch, tokens
            )
            say("KerasHub, DataParallel", step, {}, SLICE)
            continue
        lowering = JaxLowering("fsdp:-1")
        spec = (batch // DEVICES, tokens)
        ids, seen = tf.TensorSpec(spec, tf.int32), tf.TensorSpec(spec, tf.bool)
        shard = ({"token_ids": ids, "padding_mask": seen}, ids) if row != "zoo" else (ids, ids)
        where, sizes = OTHERS.get(row, (SLICE, None))
        options = TrainConfig(log_every=1, **OURS["scan-block" if sizes else row])
        build = functools.partial(build_gemma, sizes, row in LORA) if row != "zoo" else build_llama
        step = lowering.build(build, shard, DEVICES, PRECISION, options).lower()
        chosen = lowering.choose_compiler_options(parse_slice(where))
        say(f"tftpu, {where}, fsdp:8, {row}", step, chosen, where)


def build_gemma(sizes: dict[str, Any] | None = None, adapters: bool = False) -> keras.Model:
    """Builds and compiles KerasHub's model, of other sizes, or with adapters that alone train."""
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(**GEMMA3_1B | (sizes or {}))
    model = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)
    if adapters:
        models.enable_lora(model, RANK)
    return compile_model(model)


def build_llama() -> keras.Model:
    """Builds and compiles the zoo's model of these widths, as a loop with recomputed blocks.

    Its heads have 128 channels: 1,152 is no multiple of 256.
    """
    built = models.build(
        "llama_1b",
        layers=26,
        vocabulary=262_144,
        width=1152,
        hidden=6912,
        heads=9,
        kv_heads=3,
        tied=True,
        attention="flash",
        remat="block",
        scan="block",
    )
    return compile_model(built)


if __name__ == "__main__":
    main(sys.argv[1:])
