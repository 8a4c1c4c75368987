"""Compiles the train step of KerasHub's ResNet-50, with segments recomputed and without.

    python -m tests.benchmarks.compiled.keras_hub.resnet [--batch=N]

SGD, `mixed_bfloat16`, images of 224, `fsdp:8` on a v5e-8; N examples on a chip. It has no equal
blocks, so that `train.remat=block` recomputes segments of its graph.

Evidence: compiled.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import sys

import jax
import keras
import tensorflow as tf

from tests.benchmarks.compiled.keras_hub.llama import PRECISION, say
from tftpu.config import TrainConfig
from tftpu.engines.jax.lower import JaxLowering
from tftpu.tpu.slices import parse_slice

SLICE, DEVICES = "v5e-8", 8


def main(arguments: list[str]) -> None:
    """Prints cycles and memory of each program."""
    given = dict(argument.removeprefix("--").split("=") for argument in arguments)
    batch = int(given.get("batch", 128))
    jax.config.update("jax_num_cpu_devices", DEVICES)
    shard = tf.TensorSpec((batch, 224, 224, 3), tf.float32), tf.TensorSpec((batch,), tf.int32)
    for remat in ("none", "block"):
        lowering = JaxLowering("fsdp:-1")
        options = TrainConfig(log_every=1, remat=remat)
        step = lowering.build(build_resnet, shard, DEVICES, PRECISION, options).lower()
        chosen = lowering.choose_compiler_options(parse_slice(SLICE))
        say(f"tftpu, {SLICE}, fsdp:8, {remat}", step, chosen, SLICE)


def build_resnet() -> keras.Model:
    """Builds and compiles a classifier with the sizes of the preset resnet_50_imagenet."""
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        [64], [7], [64, 128, 256, 512], [3, 4, 6, 3], [1, 2, 2, 2], "bottleneck_block"
    )
    model = keras_hub.models.ResNetImageClassifier(backbone=backbone, num_classes=1000)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
