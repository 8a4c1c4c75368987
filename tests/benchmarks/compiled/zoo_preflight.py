"""Prices the train step of every family of the zoo on six slices, as a Markdown table.

    python -m tests.benchmarks.compiled.zoo_preflight [--families=bert,gpt] [--slices=v3-8,v5e-8]

One published size of each family, with the same global batch on all slices: as large as the
smallest, v2-8 with 8 cores of 7.5 GiB, can be expected to hold. TensorFlow engine, bfloat16, the
loss of the zoo's configs. A family's rows are printed as soon as its slices are compiled, which
takes minutes on 2 cores; what was compiled is cached, so the table continues where it was stopped.

Evidence: compiled.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

from tftpu import models, preflight
from tftpu.amounts import format_duration, format_price, format_size
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.preflight import PreflightOptions, SliceReport

SLICES = "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8"
COLUMNS = ("model", "batch", "slice", "per device", "memory", "step", "MFU", "1,000 steps")
TIME_LIMIT = 3000.0


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-3, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published size, and what it is trained with.

    Attributes:
        size: as `tftpu.models.build` takes it.
        batch: examples of a step on the whole slice.
        shape: of an example: pixels of an image's side, or tokens.
        optimizer: makes an optimizer.
    """

    size: str
    batch: int
    shape: int
    optimizer: Callable[[], keras.optimizers.Optimizer] = adamw

    def model(self) -> keras.Model:
        """Builds and compiles the model."""
        model = models.build(self.size)
        model.compile(self.optimizer(), SmoothedCrossentropy())
        return model

    @property
    def spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """Features and labels of a global batch."""
        if hasattr(models.config(self.size), "image_size"):
            images = tf.TensorSpec((self.batch, self.shape, self.shape, 3), tf.bfloat16)
            return images, tf.TensorSpec((self.batch,), tf.int32)
        tokens = tf.TensorSpec((self.batch, self.shape), tf.int32)
        return tokens, tokens


ROWS = {
    "resnet": Row("resnet50", 1024, 224, sgd),
    "convnext": Row("convnext_tiny", 512, 224),
    "efficientnetv2": Row("efficientnetv2_s", 256, 300, sgd),
    "vit": Row("vit_s16", 512, 224),
    "bert": Row("bert_base", 256, 128),
    "gpt": Row("gpt2_small", 32, 1024),
    "llama": Row("llama_110m", 64, 1024),
}


def lines(row: Row, slices: list[str]) -> Iterator[str]:
    """Yields the lines of a family, one for each slice."""
    unit = getattr(models.config(row.size), "norm_batch", None)  # batch statistics need groups
    options = PreflightOptions(precision="auto", time_limit=TIME_LIMIT, batch_unit=unit)
    for item in preflight.check(row.model, row.spec, slices, options).slices:
        cells = (row.size, row.batch, item.slice, item.per_core_batch or "", *figures(item))
        yield "| " + " | ".join(map(str, cells)) + " |"


def figures(item: SliceReport) -> tuple[str, ...]:
    """Returns memory, step time, MFU and cost of 1,000 steps, or the reason why there are none."""
    memory = f"{format_size(item.hbm_bytes)} of {format_size(item.hbm_limit_bytes)}"
    if item.step_ms is not None and item.mfu is not None and item.usd_per_1000_steps is not None:
        step = format_duration(item.step_ms / 1e3)
        return memory, step, f"{item.mfu:.1%}", format_price(item.usd_per_1000_steps)
    if item.fits:
        return memory, "compiles, but cannot be read and priced", "", ""
    if item.compiles:
        largest = item.largest_per_core_batch
        most = f"{largest} per device fit" if largest else "not even the smallest batch fits"
        changes = [text for text in item.advice if " makes " in text]
        return memory, f"out of memory: {changes[0] if changes else most}", "", ""
    reason = " ".join(item.error.split()).replace("|", "/")
    return "", f"does not compile: {reason[:200]}", "", ""


def main(arguments: Any = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(ROWS))
    parser.add_argument("--slices", default=SLICES)
    given = parser.parse_args(arguments)
    families = given.families.split(",")
    if not set(families) <= set(ROWS):
        parser.error(f"--families={given.families}: there are {', '.join(ROWS)}")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}", flush=True)
    for family in families:
        for line in lines(ROWS[family], given.slices.split(",")):
            print(line, flush=True)


if __name__ == "__main__":
    main()
