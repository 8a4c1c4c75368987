"""Prices fine-tuning of the open models that people use, at their real sizes; writes the table.

    python -m tests.benchmarks.compiled.keras_hub.presets [--only=NAME,...] [--slices=v5e-8,...]

Writes docs/keras-hub/costs.md, and costs.json beside it as each result comes. What that file has is
not compiled again, unless `--only` names it. The models have random weights that are never drawn.
Their sizes are checked by the number of parameters that KerasHub says the preset has.

Evidence: compiled.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import tensorflow as tf

from tftpu import models
from tftpu.amounts import format_duration, format_price, format_size
from tftpu.config import TrainConfig
from tftpu.engines.jax.lower import JaxLowering
from tftpu.preflight import PreflightOptions
from tftpu.preflight.advise import parse_memory_error
from tftpu.preflight.compiling.caller import Caller
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.examining.examiner import Examiner
from tftpu.preflight.slice_report import SliceReport
from tftpu.tpu.slices import parse_slice

PAGE = Path(__file__).parents[4] / "docs" / "keras-hub" / "costs.md"
TEXTS, TOKENS, RANK = 64, 1024, 8
MICROBATCHES = (1, 2, 4, 8)  # of the 8 texts of a device; the first that fits is taken
SLICES, WAYS = ("v5e-8", "v6e-8", "v5p-8"), ("lora", "full")


def _llama(layers: int, heads: int, kv_heads: int, width: int, hidden: int, **more: Any) -> dict:
    return {
        "vocabulary_size": 128_256,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_dim": width,
        "intermediate_dim": hidden,
        **more,
    }


def _gemma3(*sizes: int, sliding_window_size: int = 1024, head_dim: int = 256) -> dict:
    return _llama(
        *sizes,
        vocabulary_size=262_144,
        image_size=None,
        vision_encoder=None,
        head_dim=head_dim,
        use_query_key_norm=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=sliding_window_size,
    )


def _qwen3(layers: int, heads: int, kv_heads: int, width: int, hidden: int, tied: bool) -> dict:
    sizes = _llama(layers, heads, kv_heads, width, hidden, vocabulary_size=151_936)
    return sizes | {"head_dim": 128, "tie_word_embeddings": tied}


# The class of the backbone and of the task by their beginning, and what the `config.json` of the
# model on Hugging Face says of its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_270m": ("Gemma3", _gemma3(18, 4, 1, 640, 2048, sliding_window_size=512)),
    "gemma3_1b": ("Gemma3", _gemma3(26, 4, 1, 1152, 6912, sliding_window_size=512)),
    "gemma3_4b_text": ("Gemma3", _gemma3(34, 8, 4, 2560, 10_240)),
    "gemma3_12b_text": ("Gemma3", _gemma3(48, 16, 8, 3840, 15_360)),
    "gemma3_27b_text": ("Gemma3", _gemma3(62, 32, 16, 5376, 21_504, head_dim=128)),
    "qwen3_0.6b_en": ("Qwen3", _qwen3(28, 16, 8, 1024, 3072, tied=True)),
    "qwen3_1.7b_en": ("Qwen3", _qwen3(28, 16, 8, 2048, 6144, tied=True)),
    "qwen3_4b_en": ("Qwen3", _qwen3(36, 32, 8, 2560, 9728, tied=True)),
    "qwen3_8b_en": ("Qwen3", _qwen3(36, 32, 8, 4096, 12_288, tied=False)),
    "qwen3_14b_en": ("Qwen3", _qwen3(40, 40, 8, 5120, 17_408, tied=False)),
    "qwen3_32b_en": ("Qwen3", _qwen3(64, 64, 8, 5120, 25_600, tied=False)),
    "llama3.2_1b": ("Llama3", _llama(16, 32, 8, 2048, 8192)),
    "llama3.2_3b": ("Llama3", _llama(28, 24, 8, 3072, 8192)),
    "llama3.1_8b": ("Llama3", _llama(32, 32, 8, 4096, 14_336)),
    "mistral_0.3_7b_en": (
        "Mistral",
        _llama(32, 32, 8, 4096, 14_336, vocabulary_size=32_768, sliding_window=4096),
    ),
    "gpt_oss_20b_en": (
        "GptOss",
        _llama(24, 64, 8, 2880, 2880, vocabulary_size=201_088)
        | {"num_experts": 32, "top_k": 4, "head_dim": 64, "sliding_window": 128},
    ),
}
HEAD = f"""# What fine-tuning costs

Open models of KerasHub at their real sizes, as `tftpu preflight` predicts them: the memory of a
chip, the time of a step, tokens a second on the slice, and the price of a billion tokens at public
on-demand prices. **LoRA** trains adapters of rank {RANK}, **full** all weights with AdamW.

A step has {TEXTS} texts of {TOKENS:,} tokens, in as many microbatches as they need to fit, in
mixed_bfloat16, with the mesh `fsdp:-1`, `train.remat=block` and `train.scan=block`. Other settings
may be faster: [`tftpu plan`](../guides/preflight.md#the-cheapest-run) looks for them. Models are
those of texts alone, without encoders of images.

Compiled, not run: times are the middle of [their range](../guides/preflight.md#the-table). Written
by `python -m tests.benchmarks.compiled.keras_hub.presets` on 2 CPU cores ({{date}}).

"""


def main(arguments: Sequence[str]) -> None:
    """Compiles what is not known yet, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compiled.keras_hub.presets")
    parser.add_argument("--only", default="", help="names of presets, compiled anew")
    parser.add_argument("--slices", default=",".join(SLICES), help="names of slices")
    parser.add_argument("--ways", default=",".join(WAYS), help="lora, full or both")
    given = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", max(parse_slice(one).replicas for one in SLICES))
    file = PAGE.with_suffix(".json")
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    for name in given.only.split(",") if given.only else MODELS:
        for way in given.ways.split(","):
            for where in given.slices.split(","):
                key = f"{name} {way} {where}"
                if key in known["rows"] and not given.only:
                    continue
                known["rows"][key] = result = measure(name, way, where)
                print(f"{key}: {result}", flush=True)
                known["date"] = str(datetime.date.today())
                file.write_text(json.dumps(known, indent=1) + "\n")
                PAGE.write_text(format_page(known))


def build(name: str, way: str) -> keras.Model:
    """Builds and compiles a model, or adapters of one, after checking its size."""
    family, sizes = MODELS[name]
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**sizes)
    expected = type(backbone).presets[name]["metadata"]["params"]
    if backbone.count_params() != expected:
        raise ValueError(f"{name} has {backbone.count_params():,} parameters, not {expected:,}.")
    task = getattr(keras_hub.models, f"{family}CausalLM")
    model = task(backbone=backbone, preprocessor=None)
    if way == "lora":
        models.enable_lora(model, RANK)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.1), loss)
    return model


def measure(name: str, way: str, where: str) -> dict[str, Any]:
    """Returns what preflight says of the first number of microbatches that fits."""
    ids, seen = (tf.TensorSpec((TEXTS, TOKENS), dtype) for dtype in (tf.int32, tf.bool))
    batch = ({"token_ids": ids, "padding_mask": seen}, ids)
    found: SliceReport | None = None
    for microbatches in MICROBATCHES:
        train = TrainConfig(
            remat="block", scan="block", gradient_accumulation_steps=microbatches, log_every=1
        )
        options = PreflightOptions(train=train, mesh="fsdp:-1", precision="mixed_bfloat16")
        with Progress() as progress:
            examiner = Examiner(
                *(functools.partial(build, name, way), batch, options, JaxLowering("fsdp:-1")),
                *(Caller(), Processes(progress)),
            )
            found = examiner.examine_once(parse_slice(where))
        if found.step_ms is not None:
            return {
                "microbatches": microbatches,
                "hbm_bytes": found.hbm_bytes,
                "step_seconds": found.step_ms / 1e3,
                "tokens_per_second": found.tokens_per_second,
                "usd_per_billion_tokens": found.usd_per_billion_tokens,
                "compile_seconds": found.compile_seconds,
            }
        if not found.compiles:  # the state alone is too large, or something else
            break
    assert found is not None
    needed = found.hbm_bytes or (parse_memory_error(found.error) or (0, 0))[0]
    return {"hbm_bytes": needed, "error": found.error.splitlines()[0][:200]}


def format_page(known: dict[str, Any]) -> str:
    """Returns the page with all rows, by the order of `MODELS`."""
    slices = [one for one in SLICES if any(key.endswith(one) for key in known["rows"])]
    lines = [f"| model | | {' | '.join(slices)} |", f"| --- | --- |{' --- |' * len(slices)}"]
    for name in MODELS:
        for way in WAYS:
            cells = [_format_cell(known["rows"].get(f"{name} {way} {one}")) for one in slices]
            if any(cells):
                shown = "LoRA" if way == "lora" else way
                lines.append(f"| `{name}` | {shown} | {' | '.join(cells)} |")
    return HEAD.format(date=known["date"]) + "\n".join(lines) + "\n"


def _format_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return f"does not fit: {format_size(row['hbm_bytes'])}" if row["hbm_bytes"] else "not known"
    parts = [format_size(row["hbm_bytes"]), format_duration(row["step_seconds"])]
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"**{format_price(row['usd_per_billion_tokens'])}**")
    if row["microbatches"] > 1:
        parts.append(f"{row['microbatches']} microbatches")
    return ", ".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
